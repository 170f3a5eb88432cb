"""Mend what can be mended in a damaged .idx, by what the rest of the files proves.

  megapack-build verify corpus                        # what is wrong
  megapack-build repair corpus --dry-run              # what would be done
  megapack-build repair corpus

Mends dtype codes of another tool's table, pointers that overflowed, documents that a GPT-NeoX
merge lost, an .idx cut by a full disk. Tokens are never changed. The old .idx stays as .idx.orig.
"""

from __future__ import annotations

import argparse

from megapack.cli.datasets import dataset_prefixes
from megapack.storage.repair import repair

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", help="prefixes, .idx files, or directories of them")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done; do nothing")
    parser.add_argument(
        "--drop-truncated",
        action="store_true",
        help="when .bin is too short, keep the documents that are whole",
    )
    parser.add_argument(
        "--drop-trailing",
        action="store_true",
        help="cut bytes of .bin that belong to no sequence",
    )
    parser.add_argument(
        "--one-document-per-sequence",
        action="store_true",
        help="give up document indices that make no sense",
    )


def run(args: argparse.Namespace) -> int:
    for prefix in dataset_prefixes(args.inputs):
        done = repair(
            prefix,
            drop_truncated=args.drop_truncated,
            drop_trailing=args.drop_trailing,
            one_document_per_sequence=args.one_document_per_sequence,
            dry_run=args.dry_run,
        )
        if not done:
            print(f"{prefix}: nothing to mend")
            continue
        print(f"{prefix}: {'what would be done:' if args.dry_run else 'done:'}")
        for step in done:
            print(f"  {step}")
    return 0
