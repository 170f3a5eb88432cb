"""Concatenate datasets into one, documents in the order given.

  megapack-build merge shards/*.idx --output-prefix corpus
  megapack-build merge shards/ web.idx --output-prefix corpus --dtype int32

Takes datasets of megapack, Megatron, Megatron-DeepSpeed and GPT-NeoX. Memory does not grow with
their size, and the result is byte for byte what one builder would have written.
"""

from __future__ import annotations

import argparse

from megapack.cli.datasets import dataset_prefixes
from megapack.cli.report import Work, count
from megapack.storage import IndexedDataset
from megapack.storage.merge import merge

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", help="prefixes, .idx files, or directories of them")
    parser.add_argument("--output-prefix", required=True, help="prefix of the result")
    parser.add_argument(
        "--dtype", help="convert to this type (int32, uint16, ...); ids that do not fit are refused"
    )
    parser.add_argument("--multimodal", action="store_true", help="the inputs have modes")
    parser.add_argument(
        "--allow-mixed-tokenizers",
        action="store_true",
        help="merge although the inputs' meta files name different tokenizers",
    )
    parser.add_argument(
        "--remove-inputs", action="store_true", help="delete the inputs once the result stands"
    )


def run(args: argparse.Namespace) -> int:
    prefixes = dataset_prefixes(args.inputs)
    with Work(f"merging {len(prefixes)} datasets") as progress:
        merge(
            prefixes,
            args.output_prefix,
            dtype=args.dtype,
            multimodal=args.multimodal,
            allow_mixed_tokenizers=args.allow_mixed_tokenizers,
            remove_inputs=args.remove_inputs,
            progress=progress,
        )
    result = IndexedDataset(args.output_prefix)
    print(
        f"{args.output_prefix}: {len(prefixes)} datasets, {count(result.num_documents)} documents, "
        f"{count(result.num_tokens)} {result.dtype.name} tokens"
    )
    return 0
