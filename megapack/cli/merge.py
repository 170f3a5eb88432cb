"""Concatenate datasets into one, in the order given.

  megapack-build merge shards/*.idx --output-prefix corpus
  megapack-build merge shards/ web.idx --output-prefix corpus --dtype int32

A directory stands for every .idx in it. Several files of one dataset (shards/* in a shell) count as
one input; a dataset that is named twice is merged twice. Columns are merged with the tokens.
Labels, loss weights and groups of the inputs are left out, and a note says how to merge them in the
same order.

Reads datasets of megapack, Megatron, Megatron-DeepSpeed and GPT-NeoX. Memory does not grow with
their size, and the result has the bytes that one builder would have written. Inputs and output may
be addresses (s3://bucket/folder/name): inputs are fetched whole, and the result is uploaded when it
is complete.
"""

from __future__ import annotations

import argparse

from megapack.cli.arguments import add_dataset_argument, add_flags, add_shared
from megapack.cli.datasets import dataset_prefixes, documents_of
from megapack.cli.output import Work, note, print_result
from megapack.storage import IndexedDataset
from megapack.storage.index_file import GROUPS
from megapack.storage.merge import merge
from megapack.units import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_argument(parser, many=True)
    add_shared(parser, "--output-prefix")
    add_shared(parser, "--dtype", help="other inputs are converted if all their ids fit")
    add_flags(
        parser,
        multimodal="keep the mode of each sequence; all inputs must have modes",
        allow_mixed_tokenizers="merge although the meta files of the inputs name different "
        "tokenizers, or some name none, or the documents begin or end with different tokens "
        "(default: an error)",
    )
    parser.add_argument(
        "--missing-columns",
        choices=("fill", "drop"),
        help="if only some inputs have a column: give the other tokens its fill value, or leave "
        "the column out (default: an error)",
    )
    add_flags(parser, remove_inputs="delete the inputs when the result is complete")
    add_shared(parser, "--overwrite", "--json")


def run(args: argparse.Namespace) -> None:
    prefixes = documents_of(dataset_prefixes(args.prefixes))
    if any(IndexedDataset.exists(prefix + GROUPS) for prefix in prefixes):
        note(
            f"PREFIX{GROUPS} of the inputs is not merged: merge the datasets PREFIX{GROUPS} in the "
            f"same order with --output-prefix {args.output_prefix}{GROUPS}"
        )
    with Work(f"merging {counted(len(prefixes), 'dataset')}") as progress:
        is_new = merge(
            prefixes,
            args.output_prefix,
            dtype=args.dtype,
            multimodal=args.multimodal,
            allow_mixed_tokenizers=args.allow_mixed_tokenizers,
            missing_columns=args.missing_columns,
            remove_inputs=args.remove_inputs,
            overwrite=args.overwrite,
            progress=progress,
        )
    result = IndexedDataset(args.output_prefix)
    facts = {
        "prefix": args.output_prefix,
        "num_datasets": len(prefixes),
        "num_documents": result.num_documents,
        "num_tokens": result.num_tokens,
        "dtype": result.dtype.name,
        "columns": list(result.columns),
        "is_new": is_new,
    }
    text = f"nothing to do: {args.output_prefix} exists already"
    if is_new:
        text = (
            f"{args.output_prefix}: {counted(len(prefixes), 'dataset')}, "
            f"{counted(result.num_documents, 'document')}, "
            f"{counted(result.num_tokens, f'{result.dtype.name} token')}"
        )
    print_result(args, facts, text)
