"""Mend what can be mended in a damaged .idx, by what the rest of the files proves.

  megapack-build verify corpus                        # what is wrong
  megapack-build repair corpus --dry-run              # what would be done
  megapack-build repair corpus

Mends dtype codes of another tool's table, pointers that overflowed, documents that a GPT-NeoX
merge lost, an .idx cut by a full disk. Tokens are never changed. The old .idx stays as .idx.orig.
Then the dataset is verified; exit status 1 when damage remains.
"""

from __future__ import annotations

import argparse

from megapack.cli.arguments import add_dataset_argument, add_shared
from megapack.cli.datasets import dataset_prefixes
from megapack.cli.output import Work
from megapack.cli.verify import print_findings
from megapack.errors import FormatError
from megapack.storage.repair import repair
from megapack.storage.verify import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_argument(parser, many=True)
    add_shared(parser, "--dry-run")
    parser.add_argument("--no-tokens", action="store_true", help="do not read .bin")
    parser.add_argument(
        "--drop-truncated",
        action="store_true",
        help="when .bin is too short, keep the documents that are whole",
    )
    parser.add_argument(
        "--drop-trailing", action="store_true", help="cut bytes of .bin that belong to no sequence"
    )
    parser.add_argument(
        "--one-document-per-sequence",
        action="store_true",
        help="give up document indices that make no sense",
    )


def run(args: argparse.Namespace) -> int:
    return int(
        any([_repair(prefix, args) for prefix in dict.fromkeys(dataset_prefixes(args.prefixes))])
    )


def _repair(prefix: str, args: argparse.Namespace) -> bool:
    """Whether damage remains."""
    try:
        done = repair(
            prefix,
            drop_truncated=args.drop_truncated,
            drop_trailing=args.drop_trailing,
            one_document_per_sequence=args.one_document_per_sequence,
            dry_run=args.dry_run,
        )
    except FormatError as error:
        print(f"{prefix}: cannot be mended: {error}")
        return True
    if done:
        print(f"{prefix}: {'what would be done:' if args.dry_run else 'done:'}")
        print(*[f"  {step}" for step in done], sep="\n")
        if args.dry_run:
            return False
    with Work(f"reading {prefix}") as progress:
        findings = verify(prefix, tokens=not args.no_tokens, progress=progress)
    remaining = [finding for finding in findings if finding.severity == "error"]
    if remaining:
        print(f"{prefix}: still DAMAGED, in what repair does not mend:")
        print_findings(remaining)
    elif not done:
        print(f"{prefix}: nothing to mend{' (.bin was not read)' if args.no_tokens else ''}")
    return bool(remaining)
