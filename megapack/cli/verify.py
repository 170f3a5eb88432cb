"""Is a dataset whole, and is it what it claims to be?

  megapack-build verify corpus
  megapack-build verify corpus.samples
  megapack-build verify shards/ --no-tokens          # the index only: seconds instead of minutes
  megapack-build verify corpus --vocab-size 50257 --eod-token 50256

Checks header, sizes, pointers, document indices, dtype tables that clash, checksums, the range of
token ids, the ends of documents, and duplicates among the datasets named; of a .samples file all
checksums and, where its dataset is, that every segment lies inside its document. Exit status 1
when there are errors; warnings and notes do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from megapack.cli.arguments import add_dataset_argument, add_shared, token_id
from megapack.cli.datasets import dataset_prefixes
from megapack.cli.report import Work
from megapack.packing.verify import verify_samples
from megapack.storage.findings import Finding, has_errors
from megapack.storage.verify import find_duplicates, verify

__all__ = ["add_arguments", "print_findings", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_argument(parser, many=True, help="or .samples files")
    parser.add_argument("--no-tokens", action="store_true", help="do not read .bin")
    add_shared(parser, "--vocab-size", help="larger ids are errors (default: meta file)")
    add_shared(parser, "--eod-token", help="must end every non-empty document (default: meta file)")
    add_shared(parser, "--tokenizer", help="knows the name that --eod-token gives")
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> int:
    names = [name for name in args.prefixes if name.endswith(".samples")]
    prefixes = dataset_prefixes(name for name in args.prefixes if not name.endswith(".samples"))
    eod_token = token_id(args.eod_token, args.tokenizer)
    findings = {}
    for prefix in prefixes:
        with Work(f"reading {prefix}") as progress:
            findings[prefix] = verify(
                prefix,
                tokens=not args.no_tokens,
                vocab_size=args.vocab_size,
                document_end_token=eod_token,
                progress=progress,
            )
    for prefix, duplicate in find_duplicates(prefixes).items():
        findings[prefix].append(duplicate)
    findings |= {name: verify_samples(name) for name in names}
    if args.json:
        print(json.dumps({p: [dataclasses.asdict(f) for f in fs] for p, fs in findings.items()}))
    else:
        for prefix, found in findings.items():
            print(f"{prefix}: {'DAMAGED' if has_errors(found) else 'sound'}")
            print_findings(found)
    return int(any(map(has_errors, findings.values())))


def print_findings(findings: list[Finding]) -> None:
    """One line each, and what helps."""
    for finding in findings:
        remedy = f"\n           -> {finding.remedy}" if finding.remedy else ""
        print(f"  {finding.severity:7}  {finding.message}{remedy}")
