"""Repair a damaged .idx, as far as the other files of the dataset prove what it must hold.

  megapack-build verify corpus                        # what is wrong
  megapack-build repair corpus --dry-run              # what would be done
  megapack-build repair corpus

Repairs dtype codes of another tool's table, pointers that overflowed, documents that a GPT-NeoX
merge dropped, and an .idx truncated by a full disk. It never changes tokens. The old .idx is kept
as .idx.orig. Columns are cut with the tokens. Then the dataset is verified; exit status 1 if damage
remains.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from megapack.cli.arguments import add_dataset_argument, add_flags, add_shared
from megapack.cli.datasets import dataset_prefixes
from megapack.cli.output import Work, print_result
from megapack.cli.verify import print_findings
from megapack.errors import FormatError
from megapack.storage.repair import repair
from megapack.storage.verify import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_argument(parser, many=True)
    add_shared(parser, "--dry-run", "--no-tokens", "--json")
    add_flags(
        parser,
        drop_truncated="if .bin is too short, keep the documents that are complete (default: an "
        "error)",
        drop_trailing="cut bytes at the end of .bin that belong to no sequence, and bytes at the "
        "end of columns that belong to no token (default: an error)",
        drop_columns="remove columns whose file is missing or too short (default: an error)",
        one_document_per_sequence="replace invalid document bounds: make every sequence a document "
        "(default: an error)",
    )


def run(args: argparse.Namespace) -> int:
    prefixes = dict.fromkeys(dataset_prefixes(args.prefixes))
    facts = {prefix: _repair(prefix, args) for prefix in prefixes}
    print_result(args, facts, lambda: None)
    return int(any(each["refused"] or each["remaining"] for each in facts.values()))


def _repair(prefix: str, args: argparse.Namespace) -> dict[str, Any]:
    """Repair one dataset, and print what was done unless --json; return the same as facts."""
    show = (lambda *_: None) if args.json else print
    facts: dict[str, Any] = {"steps": [], "dry_run": args.dry_run, "refused": None, "remaining": []}
    try:
        steps = repair(
            prefix,
            drop_truncated=args.drop_truncated,
            drop_trailing=args.drop_trailing,
            drop_columns=args.drop_columns,
            one_document_per_sequence=args.one_document_per_sequence,
            dry_run=args.dry_run,
        )
    except FormatError as error:
        show(f"{prefix}: cannot be repaired: {error}")
        return {**facts, "refused": str(error)}
    facts["steps"] = steps
    if steps:
        show(
            "\n  ".join([f"{prefix}: {'what would be done:' if args.dry_run else 'done:'}", *steps])
        )
        if args.dry_run:
            return facts
    with Work(f"reading {prefix}") as progress:
        findings = verify(prefix, tokens=not args.no_tokens, progress=progress)
    remaining = [finding for finding in findings if finding.severity == "error"]
    if remaining:
        show(f"{prefix}: still DAMAGED, in parts that repair cannot restore:")
        if not args.json:
            print_findings(remaining, prefix)
    elif not steps:
        show(f"{prefix}: nothing to repair{' (.bin was not read)' if args.no_tokens else ''}")
    return {**facts, "remaining": [dataclasses.asdict(finding) for finding in remaining]}
