"""Is a dataset whole, and is it what it claims to be?

  megapack-build verify corpus
  megapack-build verify shards/ --no-tokens          # the index only: seconds instead of minutes
  megapack-build verify corpus --vocab-size 50257 --document-end-token 50256

Checks header, sizes, pointers, document indices, dtype tables that clash, checksums, the range of
token ids, the ends of documents, and duplicates among the datasets named. Exit status 1 when there
are errors; warnings and notes do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from megapack.cli.datasets import dataset_prefixes
from megapack.cli.report import Work
from megapack.storage.findings import Finding
from megapack.storage.verify import find_duplicates, verify

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", help="prefixes, .idx files, or directories of them")
    parser.add_argument("--no-tokens", action="store_true", help="do not read .bin")
    parser.add_argument("--vocab-size", type=int, help="ids must be smaller (default: meta file)")
    parser.add_argument(
        "--document-end-token",
        type=int,
        help="id that must end every non-empty document (default: meta file)",
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")


def run(args: argparse.Namespace) -> int:
    prefixes = dataset_prefixes(args.inputs)
    findings = {}
    for prefix in prefixes:
        with Work(f"reading {prefix}") as progress:
            findings[prefix] = verify(
                prefix,
                tokens=not args.no_tokens,
                vocab_size=args.vocab_size,
                document_end_token=args.document_end_token,
                progress=progress,
            )
    for prefix, duplicate in find_duplicates(prefixes).items():
        findings[prefix].append(duplicate)
    if args.json:
        print(json.dumps({p: [dataclasses.asdict(f) for f in fs] for p, fs in findings.items()}))
    else:
        for prefix, found in findings.items():
            _print(prefix, found)
    return int(any(_has_error(found) for found in findings.values()))


def _has_error(findings: list[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def _print(prefix: str, findings: list[Finding]) -> None:
    print(f"{prefix}: {'DAMAGED' if _has_error(findings) else 'sound'}")
    for finding in findings:
        remedy = f"\n           -> {finding.remedy}" if finding.remedy else ""
        print(f"  {finding.severity:7}  {finding.message}{remedy}")
