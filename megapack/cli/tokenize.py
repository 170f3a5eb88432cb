"""Text to documents: <output-prefix>.bin/.idx, readable by Megatron, and what belongs to them.

  megapack-build tokenize --input 'corpus/*.jsonl.zst' --tokenizer tokenizer.json \\
      --append-eod --output-prefix data/corpus --workers 16
  megapack-build tokenize --input src/ --suffix .py --tokenizer bytes --output-prefix data/code

The result is the same, byte for byte, for any number of workers and machines. Work is kept in
<output-prefix>.build/ until it is done: after a crash, run the same command again and it goes on
behind the last finished shard.

Several machines: every machine runs the same command with its own --shard i/n; when all are done,
one runs it with --finish. Or one command with --executor ray.
"""

from __future__ import annotations

import argparse
import sys
import time

from megapack.cli.arguments import byte_count
from megapack.cli.build_progress import BuildProgress
from megapack.cli.corpus_arguments import (
    add_corpus_arguments,
    add_json_key,
    add_tokenizer_files,
    tokenizer_source,
)
from megapack.cli.report import count, size
from megapack.storage import IndexedDataset
from megapack.tokenization.build import BuildResult, build
from megapack.tokenization.config import BuildConfig
from megapack.tokenization.plan import Plan

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_corpus_arguments(parser)
    add_json_key(parser)
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="PREFIX.bin/.idx")
    _add_filter_arguments(parser)
    _add_tokenizer_arguments(parser)
    _add_chat_arguments(parser)
    _add_split_arguments(parser)
    _add_execution_arguments(parser)


def _add_filter_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("documents to keep")
    group.add_argument(
        "--min-words", type=int, metavar="N", help="drop documents of fewer words, and count them"
    )
    group.add_argument("--max-words", type=int, metavar="N", help="the same for more words")


def _add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tokens")
    add_tokenizer_files(group)
    group.add_argument(
        "--backend",
        choices=("auto", "gigatoken", "tokenizers", "sentencepiece", "bytes"),
        default="auto",
        help="who runs the tokenizer; auto takes gigatoken if it gives the reference's ids on a "
        "sample of this corpus (auto)",
    )
    group.add_argument(
        "--verify-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="encode this fraction of the documents again with the reference and compare (0)",
    )
    group.add_argument("--append-eod", action="store_true", help="end every document with EOD")
    group.add_argument("--prepend-bos", action="store_true", help="begin every document with BOS")
    group.add_argument(
        "--boundary",
        choices=("eos_bos", "separator", "none"),
        default="none",
        help="shorthand: eos_bos is both of the above, separator is EOD alone (none)",
    )
    group.add_argument("--eod-token", metavar="T", help="its name, if the tokenizer does not say")
    group.add_argument("--bos-token", metavar="T", help="its name, if the tokenizer does not say")
    group.add_argument(
        "--dtype",
        choices=("auto", "uint16", "int32"),
        default="auto",
        help="of tokens on disk; auto is Megatron's rule: uint16 below 65,500 ids (auto)",
    )


def _add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("conversations")
    group.add_argument(
        "--messages-key",
        metavar="KEY",
        help="documents are conversations: KEY holds a list of {role, content}; writes a second "
        "dataset, PREFIX.labels, with -100 where a token carries no loss",
    )
    group.add_argument(
        "--chat-format",
        choices=("template", "headers"),
        default="template",
        help="the tokenizer's own chat template, or <|start_header_id|>role<|end_header_id|> "
        "(template)",
    )
    group.add_argument(
        "--chat-loss",
        choices=("content", "turn"),
        help="learn what the assistant writes, or its role header as well (content with a "
        "template, turn with headers)",
    )
    group.add_argument(
        "--label-names",
        choices=("megapack", "neox"),
        default="megapack",
        help="PREFIX and PREFIX.labels, or GPT-NeoX's PREFIX_KEY_document and "
        "PREFIX_KEY_label_document (megapack)",
    )


def _add_split_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training, validation and test documents")
    group.add_argument(
        "--split",
        metavar="W,W,W",
        help="as 98,1,1: write PREFIX_train, PREFIX_valid and PREFIX_test",
    )
    group.add_argument(
        "--split-by",
        choices=("order", "hash"),
        default="order",
        help="consecutive documents, as Megatron splits, or a hash of each document (order)",
    )
    group.add_argument(
        "--split-key",
        metavar="KEY",
        help="hash this JSON key or column (an id, a URL) instead of the text",
    )


def _add_execution_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("execution (never changes the result)")
    group.add_argument("--workers", type=int, default=1, metavar="N", help="processes (1)")
    group.add_argument(
        "--shard-size",
        type=byte_count,
        metavar="SIZE",
        help="text per shard (default: 1M to 256M, about 64 shards)",
    )
    group.add_argument(
        "--block-bytes",
        type=byte_count,
        default="4M",
        metavar="SIZE",
        help="text per batch; a worker holds about ten (4M)",
    )
    group.add_argument(
        "--worker-memory",
        type=byte_count,
        default="2G",
        metavar="SIZE",
        help="a worker that grows beyond it forgets the words its tokenizer has seen (2G)",
    )
    group.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="processes of this machine, or one Ray task per shard (local)",
    )
    group.add_argument("--ray-address", metavar="A", help="of a running cluster (Ray's own rule)")
    group.add_argument("--shard", type=_part, metavar="I/N", help="build the I-th of N parts only")
    group.add_argument(
        "--finish", action="store_true", help="join the parts that other machines built"
    )
    group.add_argument(
        "--keep-shards", action="store_true", help="leave PREFIX.build/ when all is done"
    )
    group.add_argument(
        "--overwrite", action="store_true", help="start over, whatever is there already"
    )


def _part(text: str) -> tuple[int, int]:
    i, slash, n = text.partition("/")
    if not slash or not i.isdecimal() or not n.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form I/N, as in 0/8")
    return int(i), int(n)


def run(args: argparse.Namespace) -> int:
    config = BuildConfig(
        inputs=tuple(args.input),
        suffixes=tuple(args.suffix),
        format=args.format,
        json_key=args.json_key,
        messages_key=args.messages_key,
        max_input_bytes=args.max_input_bytes,
        max_document_bytes=args.max_document_bytes,
        on_error=args.on_error,
        min_words=args.min_words,
        max_words=args.max_words,
        tokenizer=tokenizer_source(args),
        backend=args.backend,
        verify_fraction=args.verify_fraction,
        boundary=args.boundary,
        append_eod=args.append_eod,
        prepend_bos=args.prepend_bos,
        eod_token=args.eod_token,
        bos_token=args.bos_token,
        dtype=args.dtype,
        chat_format=args.chat_format,
        chat_loss=args.chat_loss,
        split=args.split,
        split_by=args.split_by,
        split_key=args.split_key,
        label_names=args.label_names,
        output_prefix=args.output_prefix,
        shard_bytes=args.shard_size,
        workers=args.workers,
        executor=args.executor,
        ray_address=args.ray_address,
        shard=args.shard,
        finish=args.finish,
        block_bytes=args.block_bytes,
        worker_memory=args.worker_memory,
        keep_shards=args.keep_shards,
        overwrite=args.overwrite,
    )
    begin = time.perf_counter()
    result = build(config, BuildProgress())
    _print_result(result, time.perf_counter() - begin)
    return 0


def _print_result(result: BuildResult, seconds: float) -> None:
    totals, plan = result.totals, result.plan
    for line in totals.fault_lines():
        print(f"skipped {line}", file=sys.stderr)
    _print_tokens(plan)
    print(
        f"documents  {count(totals.num_documents)} ({size(totals.num_text_bytes)} of text, "
        f"{count(totals.num_skipped)} skipped)"
    )
    print(f"tokens     {count(totals.num_tokens)} ({plan.dtype})")
    if result.state == "found":
        print("nothing to do: this very build is finished")
    else:
        kept = f" ({count(result.num_shards_kept)} kept from before)"
        rate = f"{size(int(totals.num_text_bytes / seconds))}/s"
        print(
            f"shards     {count(result.num_shards)}{kept if result.num_shards_kept else ''} in "
            f"{seconds:.1f} s, {rate}"
        )
    if result.state == "part":
        print("this part is done; when all are, join them with --finish")
        return
    for prefix in result.prefixes.values():
        dataset = IndexedDataset(prefix)
        held = f"{count(dataset.num_documents)} documents, {count(dataset.num_tokens)} tokens"
        print(f"dataset    {prefix}.bin, {prefix}.idx: {held}")


def _print_tokens(plan: Plan) -> None:
    tokenizer = plan.tokenizer
    print(f"tokenizer  {tokenizer.source} ({count(tokenizer.vocab_size)} ids, {plan.backend})")
    for name, token in (("BOS", plan.bos), ("EOD", plan.eod)):
        if token is not None:
            print(f"{name}        {token.text} = {token.id}")
