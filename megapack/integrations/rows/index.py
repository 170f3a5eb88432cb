"""Build the sample index of a data path before a job starts.

    python -m megapack.integrations.rows.index DATA_PATH --sequence-length 8192 --split 99,1,0 \\
        --seed 1234 --cache-directory /scratch/megapack

A run with the same options finds the files by content, and its ranks do not wait for rank 0.
DATA_PATH is the host's data path: a prefix, a manifest, or weight prefix weight prefix ...
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from megapack.errors import MegapackError, PrintableStream, printable
from megapack.integrations.rows.dataset import RowOptions
from megapack.integrations.rows.open_rows import open_documents, open_rows
from megapack.integrations.rows.text_rows import SPLITS, manifest_of_list, split_bounds

__all__ = ["main"]

DEFAULT = "(default %(default)s)"


def main(argv: Sequence[str] | None = None) -> int:
    """Build missing indices and print their paths; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megapack.integrations.rows.index",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("data_path", nargs="+", help="prefix, manifest, or weighted prefixes")
    add("--sequence-length", type=int, required=True, help="the host's --seq-length, tokens")
    add("--split", default="100,0,0", help=f"the host's --split {DEFAULT}")
    add("--seed", type=int, default=1234, help=f"the host's {DEFAULT}")
    add("--context-parallel-size", type=int, default=1, help=f"the host's {DEFAULT}")
    folder = "megapack-cache in the folder of the first source"
    add("--cache-directory", help=f"the host's --data-cache-path; default: {folder}")
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", stream=PrintableStream(sys.stderr)
    )
    try:
        manifest = manifest_of_list(args.data_path)
        options = RowOptions(
            sequence_length=args.sequence_length,
            rows_per_block=manifest.rows_per_block or 1,
            seed=args.seed,
            align=2 * args.context_parallel_size if args.context_parallel_size > 1 else 1,
        )
        sources, where = open_documents(manifest), args.cache_directory
        for name, split in zip(SPLITS, split_bounds(args.split), strict=True):
            if split[0] == split[1]:
                continue
            rows = open_rows(manifest, sources, options, split=split, cache_directory=where)
            for index in rows.packed.samples.indices:
                # For scripts that copy the files elsewhere.
                print(f"{name}\t{index.num_samples}\t{printable(str(index.path))}")  # noqa: T201
    except (MegapackError, ValueError, OSError) as error:
        print(f"megapack.integrations.rows.index: error: {printable(str(error))}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
