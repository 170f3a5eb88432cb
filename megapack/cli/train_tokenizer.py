"""Train a tokenizer on the corpus it will encode.

  megapack-build train-tokenizer --input corpus/*.jsonl --output tokenizer.model --vocab-size 32000
  megapack-build train-tokenizer --input src/ --suffix .py --output tokenizer.json --type bpe-json

The default is a sentencepiece BPE model with byte fallback: it loses nothing (no normalization,
white space kept), splits digits, and encodes any text. The sample is spread evenly over the corpus
and depends on nothing but the inputs and options; the same command gives the same file.
"""

from __future__ import annotations

import argparse
import sys
import time

from megapack.cli.arguments import add_shared, byte_count
from megapack.cli.config_arguments import add_corpus_arguments
from megapack.cli.output import note
from megapack.errors import ConfigError
from megapack.tokenization.corpus.documents import Faults, ReadOptions, fault_lines
from megapack.tokenization.corpus.inputs import find_inputs
from megapack.tokenization.tokenizers.train import train_tokenizer
from megapack.units import counted, size

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_corpus_arguments(parser)
    group = parser.add_argument_group("tokenizer")
    add_shared(group, "--output", required=True)
    add_shared(group, "--overwrite")
    group.add_argument(
        "--type",
        choices=("sentencepiece", "bpe-json"),
        default="sentencepiece",
        help="a sentencepiece .model, or a byte-level BPE tokenizer.json (sentencepiece)",
    )
    add_shared(group, "--vocab-size", default=32000, help="of the tokenizer to train (32000)")
    group.add_argument(
        "--sample-bytes",
        type=byte_count,
        default="64M",
        metavar="SIZE",
        help="text to learn from, spread over the corpus (64M)",
    )
    group.add_argument(
        "--special-token",
        nargs="+",
        default=[],
        metavar="T",
        help="further tokens that are never split, as for chat roles",
    )


def run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    suffix = ".json" if args.type == "bpe-json" else ".model"
    if not args.output.endswith(suffix):  # by which `tokenize` knows what it is
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
    if not result.written:
        print(f"nothing to do: {result.path} is there already")
    print(
        f"{result.path}: {counted(result.vocab_size, 'token')}, learned from "
        f"{counted(result.num_documents, 'document')} ({size(result.num_text_bytes)}) in "
        f"{time.perf_counter() - begin:.1f} s"
    )
    return 0
