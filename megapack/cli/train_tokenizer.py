"""Train a tokenizer on the corpus it will encode.

  megapack-build train-tokenizer --input corpus/*.jsonl --output tokenizer.model --vocab-size 32000
  megapack-build train-tokenizer --input src/ --suffix .py --output tokenizer.json --type bpe-json

The default is a sentencepiece BPE model with byte fallback. It is lossless (no normalization, white
space kept), splits digits, and encodes any text. The training sample is spread evenly over the
corpus and depends only on the inputs and options; the same command writes the same file.
"""

from __future__ import annotations

import argparse
import sys
import time

from megapack.cli.arguments import add_shared, byte_count
from megapack.cli.config_arguments import add_corpus_arguments
from megapack.cli.output import note, print_result
from megapack.errors import ConfigError
from megapack.tokenization.corpus.documents import Faults, ReadOptions, fault_lines
from megapack.tokenization.corpus.inputs import find_inputs
from megapack.tokenization.tokenizers.train import train_tokenizer
from megapack.units import counted, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_corpus_arguments(parser)
    group = parser.add_argument_group("tokenizer")
    add_shared(group, "--output", required=True)
    add_shared(group, "--overwrite", "--json")
    group.add_argument(
        "--type",
        choices=("sentencepiece", "bpe-json"),
        default="sentencepiece",
        help="a sentencepiece .model, or a byte-level BPE tokenizer.json (default: sentencepiece)",
    )
    add_shared(group, "--vocab-size", default=32000, help="number of token ids (default: 32000)")
    group.add_argument(
        "--sample-bytes",
        type=byte_count,
        default="64M",
        metavar="SIZE",
        help="size of the text to train on, sampled from the whole corpus (default: 64M)",
    )
    group.add_argument(
        "--special-token",
        nargs="+",
        default=[],
        metavar="T",
        help="more tokens that are never split, as for chat roles (default: none)",
    )


def run(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    suffix = ".json" if args.type == "bpe-json" else ".model"
    if not args.output.endswith(suffix):  # `tokenize` recognizes tokenizers by their suffix
        raise ConfigError(f"--output is {args.output}; --type {args.type} writes NAME{suffix}")
    files = find_inputs(
        args.input,
        suffixes=args.suffix,
        format=args.format,
        max_bytes=args.max_input_bytes,
        note=note,
    )
    read = ReadOptions(json_key=args.json_key, max_document_bytes=args.max_document_bytes)
    result = train_tokenizer(
        files,
        args.output,
        read=read,
        faults=Faults(args.on_error),
        type=args.type,
        vocab_size=args.vocab_size,
        sample_bytes=args.sample_bytes,
        special_tokens=args.special_token,
        overwrite=args.overwrite,
    )
    for line in fault_lines(result.faults.counts, result.faults.places):
        print(f"skipped {line}", file=sys.stderr)
    exists = "" if result.written else f"nothing to do: {result.path} exists already\n"
    facts = {**vars(result), "path": str(result.path), "faults": result.faults.counts}
    print_result(
        args,
        facts,
        f"{exists}{result.path}: {counted(result.vocab_size, 'token')}, learned from "
        f"{counted(result.num_documents, 'document')} ({size(result.num_text_bytes)}) in "
        f"{time.perf_counter() - begin:.1f} s",
    )
