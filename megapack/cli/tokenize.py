"""Turn text into a dataset: PREFIX.bin and PREFIX.idx, readable by Megatron, and their companions.

  megapack-build tokenize --input 'corpus/*.jsonl.zst' --tokenizer tokenizer.json \\
      --append-eod --output-prefix data/corpus
  megapack-build tokenize --input src/ --suffix .py --tokenizer bytes --output-prefix data/code

The result has the same bytes for any number of workers and machines. Finished shards are kept in
PREFIX.build/ until the dataset is complete: after a crash, run the same command again to resume.
--dry-run prints what the command would do, and an estimate of tokens and disk space.

PREFIX may be an address, as in s3://bucket/folder/name: the dataset is built in the cache
(MEGAPACK_CACHE), and uploaded when it is complete.

To use several machines, run the same command on each with its own --part i/n; when all are done,
run it on one with --finish. Or run one command with --executor ray.
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

from megapack.cli.arguments import Arguments, add_flags, add_shared
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

# Tokenizer types of Megatron that give the same ids as the files do here.
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
        min_words="drop and count documents of fewer words (default: keep all)",
        max_words="drop and count documents of more words (default: keep all)",
        group_key="JSON key or column whose equal values group documents (a repository, a "
        "thread); writes PREFIX.groups, for `pack --groups` (default: no groups)",
    )
    _add_tokens(parser.add_argument_group("tokens"))
    values = parser.add_argument_group("values of tokens")
    add_fields(
        values,
        weights_key="JSON key or column with the loss weights of a text: a number per token, spans "
        "[begin, end, weight] of its characters, or the path of a .npy; writes the column "
        "weights (default: no weights)",
    )
    add_shared(
        values,
        "--column",
        help="SOURCE is a JSON key or column of the corpus with a row per token, spans [begin, "
        "end, row] of characters, or the path of a .npy, relative to the input file; tokens "
        "without a value get the fill value (default TYPE: dtype and shape of the first document, "
        "token, fill=0)",
    )
    _add_chats(parser.add_argument_group("conversations"))
    add_fields(
        parser.add_argument_group("training, validation and test documents"),
        split="relative sizes, as in 98,1,1, of PREFIX_train, PREFIX_valid and PREFIX_test "
        "(default: one dataset)",
        split_by="split consecutive documents, as Megatron does, or by a hash of each document "
        "(default: order)",
        split_key="with --split-by hash, the JSON key or column to hash, as an id or a URL "
        "(default: the text)",
    )
    add_fields(
        parser.add_argument_group("shards (the same for all parts of a build)"),
        shard_bytes="text per shard; another size gives the same documents, but cannot reuse the "
        "shards of an unfinished build (default: 1M to 256M, about 64 shards)",
        part="build only part I of N, counted from 0",
        finish="join the parts that other machines have built",
        keep_shards="keep PREFIX.build/ when the dataset is complete",
    )
    _add_execution(parser.add_argument_group("execution (the result does not depend on these)"))
    _add_megatron(parser.add_argument_group("options of Megatron's preprocess_data.py"))


def _add_tokens(group: Arguments) -> None:
    add_shared(group, "--tokenizer")
    add_fields(
        group,
        backend={
            "choices": ("auto", "gigatoken", "tokenizers", "sentencepiece", "bytes"),
            "help": "library that runs the tokenizer; auto uses gigatoken if it gives the ids of "
            "the reference on a sample of this corpus (default: auto)",
        },
        verify_fraction="fraction of the documents, 0 to 1, to encode again with the reference "
        "library and compare (default: 0)",
        append_eod="end every document with the EOD token",
        prepend_bos="begin every document with the BOS token",
        bos_token="token that begins documents (BOS), by name or by decimal id",
    )
    add_shared(group, "--eod-token", help="required if the tokenizer does not define it")
    add_fields(
        group,
        special_tokens="turn special tokens in a text into their ids, as transformers does, or "
        "encode them as text, as with split_special_tokens (default: ids)",
    )
    add_shared(
        group,
        "--dtype",
        choices=("auto", "uint16", "int32"),
        default="auto",
        help="auto is Megatron's rule: uint16 below 65,500 ids (default: auto)",
    )


def _add_chats(group: Arguments) -> None:
    add_fields(
        group,
        messages_key="JSON key or column with a list of {role, content}: documents are "
        "conversations; writes the column labels, with -100 where a token has no loss (default: "
        "documents are text)",
        chat_format="format conversations with the tokenizer's chat template, or with headers "
        "<|start_header_id|>role<|end_header_id|> (default: template)",
        chat_loss="compute loss on the assistant's content, or on the whole turn with its role "
        "header (default: content with a template, turn with headers)",
        tools_key="key of the tool schemas of a conversation, passed to its template; '' passes "
        "none (default: tools)",
        template_variables={
            "nargs": "+",
            "metavar": "NAME[=JSON]",
            "help": "more variables for the chat template: NAME takes the value of this key of a "
            "document (as in documents, enable_thinking), NAME=JSON is one value for all, NAME= "
            "leaves a key of the documents out",
        },
    )


def _add_execution(group: Arguments) -> None:
    add_shared(group, "--workers")
    add_fields(
        group,
        block_bytes="text per batch; a worker holds about ten (default: 4M)",
        worker_memory="memory of a worker above which it clears the word cache of its tokenizer "
        "(default: 2G)",
        executor="run processes on this machine, or one Ray task per shard (default: local)",
        ray_address="address of a running Ray cluster (default: Ray's own rule)",
    )


def _add_megatron(group: Arguments) -> None:
    group.add_argument(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="write one dataset per JSON key, with the name that Megatron gives it: "
        "PREFIX_KEY_document (default: one dataset, of --json-key)",
    )
    group.add_argument(
        "--tokenizer-model", dest="tokenizer", metavar="T", help="same as --tokenizer"
    )
    group.add_argument(
        "--vocab-file", metavar="FILE", help="GPT-2's vocab.json; --merge-file gives merges.txt"
    )
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of --vocab-file")
    group.add_argument(
        "--tokenizer-type",
        choices=tuple(_MEGATRON_TYPES),
        help="expected type of the tokenizer; an error if its files are of another type",
    )
    text = "no effect: documents always keep the order of the corpus"
    add_flags(group, keep_sequential_samples=text)


def run(args: argparse.Namespace) -> None:
    _translate(args)
    progress = BuildProgress()
    facts = []
    for config in list(_configs(args)):
        begin = time.perf_counter()
        result = preview(config, progress) if args.dry_run else build(config, progress)
        seconds = time.perf_counter() - begin
        if args.json:
            if isinstance(result, Preview):
                facts.append(_preview_facts(result))
            else:
                facts.append(_result_facts(result, seconds))
        elif isinstance(result, Preview):
            _print_preview(result)
        else:
            _print_result(result, seconds)
    if args.json:  # an array only if there are several
        print(json.dumps(facts[0] if len(facts) == 1 else facts, indent=1))


def _configs(args: argparse.Namespace) -> Iterator[BuildConfig]:
    config = BuildConfig(**values_of(args))
    if args.json_keys is None:
        yield config
    for key in dict.fromkeys(args.json_keys or ()):
        prefix = f"{config.output_prefix}_{key}_document"
        yield dataclasses.replace(config, json_key=key, output_prefix=prefix)


def _translate(args: argparse.Namespace) -> None:
    """Replace Megatron's options by those of this command, or refuse them."""
    files = (args.vocab_file, args.merge_file)
    if any(files):
        if args.tokenizer is not None or not all(files):
            raise ConfigError(
                "--vocab-file and --merge-file describe one tokenizer together: give both, and no "
                "--tokenizer"
            )
        args.tokenizer = ",".join(files)
    if args.tokenizer is None:
        raise ConfigError("--tokenizer is missing: a .model, a tokenizer.json, a directory, bytes")
    if args.json_keys and (args.messages_key is not None or args.json_key != "text"):
        raise ConfigError("--json-keys replaces --json-key and --messages-key: leave these out")
    for key in args.json_keys or ():
        if "/" in key:
            raise ConfigError(
                f"the key {key!r} cannot be part of a file name; give --json-key {key} with "
                "another --output-prefix"
            )
    if args.tokenizer_type is not None:
        kind = TokenizerFiles.open(args.tokenizer).kind
        if kind != _MEGATRON_TYPES[args.tokenizer_type]:
            raise ConfigError(
                f"{args.tokenizer} is not a {args.tokenizer_type}; leave out --tokenizer-type"
            )
        if args.tokenizer_type == "HuggingFaceTokenizer":
            note(
                "in Megatron this tokenizer may add special tokens; here only --prepend-bos and "
                "--append-eod add tokens"
            )


class BuildProgress:
    """Progress of a build on stderr: first its shards, with rates, then joining them."""

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


# ---- Results of --dry-run and of a build, as JSON and as text ------------------------------------

_MOST_SPECIAL_TOKENS = 5  # kinds that are listed


def _preview_facts(preview: Preview) -> dict[str, Any]:
    return {
        "digest": preview.plan.digest,
        "plan": preview.plan.tree(),
        "datasets": list(preview.prefixes.values()),
        "estimate": dataclasses.asdict(preview.estimate),
        "missing_shards": preview.num_missing,
        "finished": preview.finished,
        "other_plans": list(preview.other_plans),
    }


def _print_preview(preview: Preview) -> None:
    plan, estimate = preview.plan, preview.estimate
    print(f"plan       {plan.digest}")
    formats = collections.Counter(
        file.format + (file.compression and f".{file.compression}") for file in plan.inputs
    )
    kinds = ", ".join(f"{name} {count(number)}" for name, number in formats.most_common())
    on_disk = size(sum(file.size for file in plan.inputs))
    print(f"input      {counted(len(plan.inputs), 'file')}, {on_disk} ({kinds})")
    content = "conversations" if plan.chat_format else "text"
    limits = (("at least", plan.config.min_words), ("at most", plan.config.max_words))
    filters = [f"{words} {counted(n, 'word')}" for words, n in limits if n is not None]
    fails = plan.config.on_error == "fail"
    filters.append("faults stop the build" if fails else "faulty ones skipped")
    print(f"documents  {content} under {plan.read.json_key!r}, {', '.join(filters)}")
    _print_tokens(plan)
    for package, version in plan.libraries.items():
        if package != "megapack":
            print(f"library    {package} {version}")
    if plan.split is not None:
        weights = zip(SPLIT_NAMES, plan.split, strict=True)
        shares = ", ".join(f"{name} {percent(w / sum(plan.split))}" for name, w in weights if w)
        print(f"split      {shares}, by {plan.read.split_key or plan.config.split_by}")
    print(f"tokens     about {short(estimate.num_tokens)} ({plan.dtype})")
    finished = len(plan.shards) - preview.num_missing
    print(
        f"shards     {count(len(plan.shards))} of about {size(plan.shard_bytes)} of text, "
        f"{count(finished)} finished"
    )
    directory = Path(next(iter(preview.prefixes.values()))).parent
    # The output folder may not exist yet: look at the file system of its parent.
    while not directory.exists():
        directory = directory.parent
    print(
        f"disk       about {size(estimate.num_bytes)}, and as much for shards until they are "
        f"joined; {size(free_bytes(directory))} free"
    )
    for prefix in preview.prefixes.values():
        print(f"dataset    {prefix}.bin, {prefix}.idx")
    for line in preview.other_plans:
        print(f"other plan {line}")
    if preview.finished:
        print("nothing to do: this build is complete")


def _print_tokens(plan: Plan) -> None:
    tokenizer = plan.tokenizer
    print(f"tokenizer  {tokenizer.name} ({count(tokenizer.vocab_size)} ids, {plan.backend})")
    for name, token in (("BOS", plan.bos), ("EOD", plan.eod)):
        if token is not None:
            print(f"{name}        {token.text} = {token.id}")
    if plan.eod is None and plan.chat_format != "template":
        print("EOD        none: no token ends a document; --append-eod adds one")


def _result_facts(result: BuildResult, seconds: float) -> dict[str, Any]:
    return {
        "state": result.state,
        "digest": result.plan.digest,
        "datasets": _written(result),
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
        kinds = [f"{count(n)} x {text}" for text, n in totals.special_tokens_found.items()]
        others = len(kinds) - _MOST_SPECIAL_TOKENS
        more = f", and {others} others" if others > 0 else ""
        note(
            f"special tokens in the text became their ids: "
            f"{', '.join(kinds[:_MOST_SPECIAL_TOKENS])}{more}; --special-tokens text encodes them "
            "as text"
        )
    if result.state == "complete":
        print("nothing to do: this build is complete")
    else:
        kept = f" ({count(result.num_shards_kept)} kept from before)"
        rate = f"{size(int(totals.num_text_bytes / seconds))}/s"
        print(
            f"shards     {count(result.num_shards)}{kept if result.num_shards_kept else ''} in "
            f"{seconds:.1f} s, {rate}"
        )
    if result.state == "part":
        print("this part is done; when all parts are done, join them with --finish")
    for prefix, counts in _written(result).items():
        print(
            f"dataset    {prefix}.bin, {prefix}.idx: {counted(counts['documents'], 'document')}, "
            f"{counted(counts['tokens'], 'token')}"
        )


def _written(result: BuildResult) -> dict[str, dict[str, int]]:
    """Return prefix -> counts of the datasets that this build has completed."""
    prefixes = () if result.state == "part" else result.prefixes.values()
    datasets = {prefix: IndexedDataset(prefix) for prefix in prefixes}
    return {
        prefix: {"documents": dataset.num_documents, "tokens": dataset.num_tokens}
        for prefix, dataset in datasets.items()
    }
