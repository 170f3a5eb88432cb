"""Text to documents: <output-prefix>.bin/.idx, readable by Megatron, and what belongs to them.

  megapack-build tokenize --input 'corpus/*.jsonl.zst' --tokenizer tokenizer.json \\
      --append-eod --output-prefix data/corpus
  megapack-build tokenize --input src/ --suffix .py --tokenizer bytes --output-prefix data/code

The result is the same, byte for byte, for any number of workers and machines. Work is kept in
<output-prefix>.build/ until it is done: after a crash, run the same command again and it goes on
behind the last finished shard. --dry-run says what would be done, and what it will take.

PREFIX may be an address, as s3://bucket/folder/name: the dataset is built in the cache
(MEGAPACK_CACHE), and uploaded when it is complete.

Several machines: every machine runs the same command with its own --part i/n; when all are done,
one runs it with --finish. Or one command with --executor ray.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megapack.cli.arguments import (
    Arguments,
    add_shared,
    byte_count,
    part_of,
    token_argument,
)
from megapack.cli.config_arguments import add_corpus_arguments, add_fields, values_of
from megapack.cli.output import Work, note
from megapack.errors import ConfigError
from megapack.executors import Counted
from megapack.storage import IndexedDataset
from megapack.tokenization.corpus.documents import SPLIT_NAMES
from megapack.tokenization.pipeline.plan import BuildConfig, Plan
from megapack.tokenization.pipeline.run import BuildResult, Preview, build, preview
from megapack.tokenization.pipeline.workspace import free_bytes
from megapack.tokenization.tokenizers.tokenizer import Kind, TokenizerFiles
from megapack.units import count, counted, percent, short, size

# ---- How a build shows its progress: first the shards, then how they are joined -----------------


class BuildProgress:
    """Documents/s, MB/s, tokens/s and the time left, on stderr."""

    def __init__(self) -> None:
        self._work: Work | None = None

    def note(self, text: str) -> None:
        note(text)

    def start(self, num_bytes: int, num_shards: int, disk_bytes: int) -> None:
        written = f"; about {size(disk_bytes)} of shards to write" if disk_bytes else ""
        print(f"{size(num_bytes)} in {counted(num_shards, 'shard')}{written}", file=sys.stderr)
        self._num_bytes, self._done, self._begin = num_bytes, Counted(), time.monotonic()
        self._work = Work("tokenizing")

    def advance(self, more: Counted) -> None:
        done = self._done = self._done.plus(more)
        seconds = max(1e-3, time.monotonic() - self._begin)
        rates = (
            f"{short(done.documents / seconds)} documents/s  "
            f"{size(int(done.text_bytes / seconds))}/s  {short(done.tokens / seconds)} tokens/s"
        )
        if self._work is not None:
            self._work(done.text_bytes, self._num_bytes, rates)

    def join(self, done: int, total: int) -> None:
        if done == 1:
            self.stop()
            self._work = Work("joining the shards")
        if self._work is not None:
            self._work(done, total)

    def stop(self) -> None:
        if self._work is not None:
            self._work.__exit__()
            self._work = None


# ---- What a build would do, and what it did: as text, or as one JSON value ----------------------


def _preview_tree(preview: Preview) -> dict[str, Any]:
    return {
        "digest": preview.plan.digest,
        "plan": preview.plan.tree(),
        "datasets": list(preview.prefixes.values()),
        "estimate": dataclasses.asdict(preview.estimate),
        "missing_shards": preview.num_missing,
        "finished": preview.finished,
        "left_behind": list(preview.left_behind),
    }


def _print_preview(preview: Preview) -> None:
    plan = preview.plan
    print(f"plan       {plan.digest}")
    formats = collections.Counter(
        file.format + (file.compression and f".{file.compression}") for file in plan.inputs
    )
    kinds = ", ".join(f"{name} {count(number)}" for name, number in formats.most_common())
    on_disk = size(sum(file.size for file in plan.inputs))
    print(f"input      {counted(len(plan.inputs), 'file')}, {on_disk} ({kinds})")
    what = "conversations" if plan.has_labels else "text"
    print(f"documents  {what} under {plan.read.json_key!r}, {_filters(plan)}")
    _print_tokens(plan)
    for package, version in plan.libraries.items():
        if package != "megapack":
            print(f"library    {package} {version}")
    if plan.split is not None:
        shares = zip(SPLIT_NAMES, plan.split, strict=True)
        said = ", ".join(f"{name} {percent(w / sum(plan.split))}" for name, w in shares if w)
        print(f"split      {said}, by {plan.read.split_key or plan.config.split_by}")
    estimate = preview.estimate
    print(f"tokens     about {short(estimate.num_tokens)} ({plan.dtype})")
    finished = len(plan.shards) - preview.num_missing
    print(
        f"shards     {count(len(plan.shards))} of about {size(plan.shard_bytes)} of text, "
        f"{count(finished)} finished"
    )
    directory = Path(next(iter(preview.prefixes.values()))).parent
    while not directory.exists():
        directory = directory.parent
    print(
        f"disk       about {size(estimate.num_bytes)}, and as much for shards until they are "
        f"joined; {size(free_bytes(directory))} free"
    )
    for prefix in preview.prefixes.values():
        print(f"dataset    {prefix}.bin, {prefix}.idx")
    for line in preview.left_behind:
        print(f"beside     {line}")
    if preview.finished:
        print("nothing to do: this very build is finished")


def _filters(plan: Plan) -> str:
    words = [
        f"{limit} {counted(number, 'word')}"
        for limit, number in (
            ("at least", plan.config.min_words),
            ("at most", plan.config.max_words),
        )
        if number is not None
    ]
    faults = "faults stop the build" if plan.config.on_error == "fail" else "faulty ones skipped"
    return ", ".join([*words, faults])


def _result_tree(result: BuildResult, seconds: float) -> dict[str, Any]:
    return {
        "state": result.state,
        "digest": result.plan.digest,
        "datasets": {prefix: _counts(prefix) for prefix in _written(result)},
        "shards": result.num_shards,
        "kept_shards": result.num_shards_kept,
        "seconds": seconds,
        **dataclasses.asdict(result.totals),
    }


def _print_result(result: BuildResult, seconds: float) -> None:
    totals = result.totals
    for line in totals.fault_lines():
        print(f"skipped {line}", file=sys.stderr)
    _print_tokens(result.plan)
    print(
        f"documents  {count(totals.num_documents)} ({size(totals.num_text_bytes)} of text, "
        f"{count(totals.num_skipped)} skipped)"
    )
    print(f"tokens     {count(totals.num_tokens)} ({result.plan.dtype})")
    if totals.special_tokens_found:
        shown = [f"{count(n)} x {text}" for text, n in totals.special_tokens_found.items()]
        more = f", and {len(shown) - _SHOWN} others" if len(shown) > _SHOWN else ""
        note(
            f"special tokens in the text became their ids: {', '.join(shown[:_SHOWN])}{more}; "
            "--special-tokens text encodes them as text"
        )
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
    for prefix in _written(result):
        held = _counts(prefix)
        print(
            f"dataset    {prefix}.bin, {prefix}.idx: {counted(held['documents'], 'document')}, "
            f"{counted(held['tokens'], 'token')}"
        )


def _written(result: BuildResult) -> list[str]:
    return [] if result.state == "part" else list(result.prefixes.values())


def _counts(prefix: str) -> dict[str, int]:
    dataset = IndexedDataset(prefix)
    return {"documents": dataset.num_documents, "tokens": dataset.num_tokens}


def _print_tokens(plan: Plan) -> None:
    tokenizer = plan.tokenizer
    print(f"tokenizer  {tokenizer.name} ({count(tokenizer.vocab_size)} ids, {plan.backend})")
    for name, token in (("BOS", plan.bos), ("EOD", plan.eod)):
        if token is not None:
            print(f"{name}        {token.text} = {token.id}")
    if plan.eod is None and plan.chat_format != "template":
        print("EOD        none: no token ends a document; --append-eod adds one")


_SHOWN = 5  # kinds of special tokens

# Megatron's names of tokenizers that give the ids which the same files give here.
_MEGATRON_TYPES: dict[str, Kind] = {
    "GPT2BPETokenizer": "hf",
    "HuggingFaceTokenizer": "hf",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_corpus_arguments(parser)
    add_shared(parser, "--output-prefix", "--overwrite", "--dry-run", "--json")
    add_fields(
        parser.add_argument_group("documents to keep"),
        min_words={"metavar": "N", "help": "drop documents of fewer words, and count them"},
        max_words={"metavar": "N", "help": "the same for more words"},
        group_key={
            "metavar": "KEY",
            "help": "documents of one value of this JSON key or column (a repository, a thread) "
            "belong together: PREFIX.groups, for `pack --groups`",
        },
    )
    _add_tokens(parser.add_argument_group("tokens"))
    add_fields(
        parser.add_argument_group("loss weights"),
        weights_key={
            "metavar": "KEY",
            "help": "KEY holds the loss weights of a text: a number per token, spans [begin, end, "
            "weight] of its characters, or the path of a .npy; writes a second dataset, "
            "PREFIX.weights",
        },
    )
    _add_chats(parser.add_argument_group("conversations"))
    add_fields(
        parser.add_argument_group("training, validation and test documents"),
        split={
            "metavar": "W,W,W",
            "help": "as 98,1,1: write PREFIX_train, PREFIX_valid and PREFIX_test",
        },
        split_by="consecutive documents, as Megatron splits, or a hash of each document (order)",
        split_key={
            "metavar": "KEY",
            "help": "hash this JSON key or column (an id, a URL) instead of the text",
        },
    )
    add_fields(
        parser.add_argument_group("shards (the same for all parts of a build)"),
        shard_bytes={
            "type": byte_count,
            "metavar": "SIZE",
            "help": "text per shard; another size gives the same documents, but cannot use the "
            "shards of a build that was begun (default: 1M to 256M, about 64 shards)",
        },
        part={"type": part_of, "metavar": "I/N", "help": "build part I of N only, from 0"},
        finish="join the parts that other machines built",
        keep_shards="leave PREFIX.build/ when all is done",
    )
    _add_execution(parser.add_argument_group("execution (never changes the result)"))
    _add_megatron(parser.add_argument_group("spellings of Megatron's preprocess_data.py"))


def _add_tokens(group: Arguments) -> None:
    add_shared(group, "--tokenizer")
    add_fields(
        group,
        backend={
            "choices": ("auto", "gigatoken", "tokenizers", "sentencepiece", "bytes"),
            "help": "who runs the tokenizer; auto takes gigatoken if it gives the reference's ids "
            "on a sample of this corpus (auto)",
        },
        verify_fraction={
            "metavar": "F",
            "help": "encode this fraction of the documents again with the reference and compare "
            "(0)",
        },
        append_eod="end every document with EOD",
        prepend_bos="begin every document with BOS",
        bos_token={
            "type": token_argument,
            "metavar": "T",
            "help": "as --eod-token, for the token that begins documents",
        },
    )
    add_shared(group, "--eod-token", help="needed where the tokenizer does not say it")
    add_fields(
        group,
        special_tokens="special tokens that a text contains become their ids, as in transformers, "
        "or are encoded as text, as with split_special_tokens (ids)",
    )
    add_shared(
        group,
        "--dtype",
        choices=("auto", "uint16", "int32"),
        default="auto",
        help="auto is Megatron's rule: uint16 below 65,500 ids (auto)",
    )


def _add_chats(group: Arguments) -> None:
    add_fields(
        group,
        messages_key={
            "metavar": "KEY",
            "help": "documents are conversations: KEY holds a list of {role, content}; writes a "
            "second dataset, PREFIX.labels, with -100 where a token carries no loss",
        },
        chat_format="the tokenizer's own chat template, or "
        "<|start_header_id|>role<|end_header_id|> (template)",
        chat_loss="learn what the assistant writes, or its role header as well (content with a "
        "template, turn with headers)",
        tools_key={
            "metavar": "KEY",
            "help": "KEY holds the tools of a conversation, schemas that its template is given; '' "
            "leaves them out (tools)",
        },
        template_variables={
            "nargs": "+",
            "metavar": "NAME[=JSON]",
            "help": "what a template is given beside that: NAME is a key of documents (documents, "
            "enable_thinking), NAME=JSON is the same for all, NAME= leaves a key of documents out",
        },
        label_names="PREFIX and PREFIX.labels, or GPT-NeoX's PREFIX_KEY_document and "
        "PREFIX_KEY_label_document (megapack)",
    )


def _add_execution(group: Arguments) -> None:
    add_shared(group, "--workers")
    size = {"type": byte_count, "metavar": "SIZE"}
    add_fields(
        group,
        block_bytes={**size, "help": "text per batch; a worker holds about ten (4M)"},
        worker_memory={
            **size,
            "help": "a worker that grows beyond it forgets the words its tokenizer has seen (2G)",
        },
        executor="processes of this machine, or one Ray task per shard (local)",
        ray_address={"metavar": "A", "help": "of a running cluster (Ray's own rule)"},
    )


def _add_megatron(group: Arguments) -> None:
    group.add_argument(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="one dataset per key, each with the name that Megatron gives it: PREFIX_KEY_document",
    )
    group.add_argument(
        "--tokenizer-model", dest="tokenizer", metavar="T", help="the same as --tokenizer"
    )
    group.add_argument(
        "--vocab-file", metavar="FILE", help="GPT-2's vocab.json, with --merge-file merges.txt"
    )
    group.add_argument("--merge-file", metavar="FILE", help="see --vocab-file")
    group.add_argument(
        "--tokenizer-type",
        choices=tuple(_MEGATRON_TYPES),
        help="refused where it is not what the files hold",
    )
    group.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="documents keep the order of the corpus, as they always do here",
    )
    group.add_argument("--partitions", metavar="N", help="refused: --workers shares out the work")


def run(args: argparse.Namespace) -> int:
    _translate(args)
    progress = BuildProgress()
    trees = []
    for config in list(_configs(args)):
        if args.dry_run:
            before = preview(config, progress)
            if args.json:
                trees.append(_preview_tree(before))
            else:
                _print_preview(before)
            continue
        begin = time.perf_counter()
        result = build(config, progress)
        seconds = time.perf_counter() - begin
        if args.json:
            trees.append(_result_tree(result, seconds))
        else:
            _print_result(result, seconds)
    if args.json:  # an object, or an array where there are several
        print(json.dumps(trees[0] if len(trees) == 1 else trees, indent=1))
    return 0


def _configs(args: argparse.Namespace) -> Iterator[BuildConfig]:
    """One, or one for every key of --json-keys."""
    config = BuildConfig(**values_of(args))
    if args.json_keys is None:
        yield config
    for key in dict.fromkeys(args.json_keys or ()):
        prefix = f"{config.output_prefix}_{key}_document"
        yield dataclasses.replace(config, json_key=key, output_prefix=prefix)


def _translate(args: argparse.Namespace) -> None:
    """Megatron's spellings in our words, or a refusal."""
    files = (args.vocab_file, args.merge_file)
    if any(files):
        if args.tokenizer is not None or not all(files):
            raise ConfigError("--vocab-file and --merge-file name one tokenizer, both together")
        args.tokenizer = ",".join(files)
    if args.tokenizer is None:
        raise ConfigError("--tokenizer is missing: a .model, a tokenizer.json, a directory, bytes")
    if args.partitions is not None:
        raise ConfigError(
            "--partitions is not needed: leave it out. Shards are made by themselves "
            "(--shard-bytes) and shared out to --workers, or to machines with --part I/N"
        )
    if args.json_keys and (args.messages_key is not None or args.json_key != "text"):
        raise ConfigError("--json-keys stands for itself; leave out --json-key and --messages-key")
    for key in args.json_keys or ():
        if "/" in key:
            raise ConfigError(
                f"the key {key!r} cannot be part of a file's name; give --json-key {key} with an "
                "--output-prefix of its own"
            )
    if args.tokenizer_type is not None:
        kind = TokenizerFiles.open(args.tokenizer).kind
        if kind != _MEGATRON_TYPES[args.tokenizer_type]:
            raise ConfigError(
                f"{args.tokenizer} is no {args.tokenizer_type}; leave out --tokenizer-type"
            )
        if args.tokenizer_type == "HuggingFaceTokenizer":
            note(
                "in Megatron this tokenizer may add special tokens of its own; here --prepend-bos "
                "and --append-eod say what is added"
            )
