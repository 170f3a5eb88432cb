"""Concatenate datasets into one, documents in the order given.

  megapack-build merge shards/*.idx --output-prefix corpus
  megapack-build merge shards/ web.idx --output-prefix corpus --dtype int32

A dataset that is named twice comes twice; a directory names each .idx in it, and the other files of
a dataset (shards/* in a shell) do not name it once more. Labels, loss weights and groups that stand
beside the datasets are left out, and a note says how they are merged, in the same order.

Takes datasets of megapack, Megatron, Megatron-DeepSpeed and GPT-NeoX. Memory does not grow with
their size, and the result is byte for byte what one builder would have written. Any of them may be
an address (s3://bucket/folder/name): inputs are fetched whole, and the result is uploaded when it
is complete.
"""

from __future__ import annotations

import argparse

from megapack.cli.arguments import add_dataset_argument, add_shared
from megapack.cli.datasets import dataset_prefixes, documents_of
from megapack.cli.output import Work, note, printed_as_json
from megapack.storage import IndexedDataset
from megapack.storage.index_file import BESIDE
from megapack.storage.merge import merge
from megapack.units import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_argument(parser, many=True)
    add_shared(parser, "--output-prefix")
    add_shared(parser, "--dtype", help="inputs of others are converted where all ids fit")
    parser.add_argument("--multimodal", action="store_true", help="the inputs have modes")
    parser.add_argument(
        "--allow-mixed-tokenizers",
        action="store_true",
        help="merge although the inputs' meta files name different tokenizers, or some name none, "
        "or their documents begin or end with different tokens",
    )
    parser.add_argument(
        "--remove-inputs", action="store_true", help="delete the inputs once the result stands"
    )
    add_shared(parser, "--overwrite", "--json")


def run(args: argparse.Namespace) -> int:
    prefixes = documents_of(dataset_prefixes(args.prefixes))
    for end in BESIDE:
        if any(IndexedDataset.exists(prefix + end) for prefix in prefixes):
            note(
                f"PREFIX{end} of the inputs is not merged: merge the datasets PREFIX{end} in the "
                f"same order with --output-prefix {args.output_prefix}{end}"
            )
    with Work(f"merging {counted(len(prefixes), 'dataset')}") as progress:
        is_new = merge(
            prefixes,
            args.output_prefix,
            dtype=args.dtype,
            multimodal=args.multimodal,
            allow_mixed_tokenizers=args.allow_mixed_tokenizers,
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
        "is_new": is_new,
    }
    if printed_as_json(args, facts):
        return 0
    if is_new:
        print(
            f"{args.output_prefix}: {counted(len(prefixes), 'dataset')}, "
            f"{counted(result.num_documents, 'document')}, "
            f"{counted(result.num_tokens, f'{result.dtype.name} token')}"
        )
    else:
        print(f"nothing to do: {args.output_prefix} is there already")
    return 0
