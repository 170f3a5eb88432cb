"""Is a dataset whole, and is it what it claims to be?

  megapack-build verify corpus
  megapack-build verify corpus.samples
  megapack-build verify web.shards.json
  megapack-build verify shards/ --no-tokens          # the index only: seconds instead of minutes
  megapack-build verify corpus --vocab-size 50257 --eod-token 50256

Checks header, sizes, pointers, document indices, dtype tables that clash, checksums, the range of
token ids, the ends of documents, and duplicates among the datasets named; of a .samples file all
checksums and, where its dataset is, that every segment lies inside its document; of a shard
manifest all of that for every shard, and that its files are what the manifest says of them (told of
those where something is wrong). Datasets at addresses are fetched one after the other. Exit status
1 when there are errors; warnings and notes do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from megapack.cli.arguments import add_dataset_argument, add_shared, token_id
from megapack.cli.datasets import named_files
from megapack.cli.output import Work
from megapack.errors import FormatError
from megapack.packing.sharded import SUFFIX, load_shards
from megapack.packing.verify import verify_samples, verify_shard
from megapack.storage.verify import Finding, find_duplicates, has_errors, verify
from megapack.units import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_argument(parser, many=True, help="or .samples files, or shard manifests")
    parser.add_argument("--no-tokens", action="store_true", help="do not read .bin")
    add_shared(parser, "--vocab-size", help="larger ids are errors (default: meta file)")
    add_shared(parser, "--eod-token", help="must end every non-empty document (default: meta file)")
    add_shared(parser, "--tokenizer", help="knows the name that --eod-token gives")
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> int:
    prefixes, names, manifests = named_files(args.prefixes)
    eod_token = token_id(args.eod_token, args.tokenizer)
    findings: dict[str, list[Finding]] = {}
    for prefix in prefixes:
        with Work(f"reading {prefix}") as progress:
            findings[prefix] = verify(
                prefix,
                tokens=not args.no_tokens,
                vocab_size=args.vocab_size,
                document_end_token=eod_token,
                progress=progress,
            )
    findings |= {name: verify_samples(name) for name in names}
    named = {*findings, *manifests}
    for manifest in manifests:
        shards, findings[manifest] = _verify_source(manifest, tokens=not args.no_tokens)
        findings |= shards
    datasets = [name for name in findings if not name.endswith((".samples", SUFFIX))]
    for prefix, duplicate in find_duplicates(datasets).items():
        findings[prefix].append(duplicate)
    if args.json:
        print(json.dumps({p: [dataclasses.asdict(f) for f in fs] for p, fs in findings.items()}))
    else:
        for name, found in findings.items():
            if name in named or any(finding.severity != "note" for finding in found):
                print(f"{name}: {'DAMAGED' if has_errors(found) else 'sound'}")
                print_findings(found)
    return int(any(map(has_errors, findings.values())))


def _verify_source(
    manifest: str, *, tokens: bool
) -> tuple[dict[str, list[Finding]], list[Finding]]:
    """Findings about the files of all shards and the manifest."""
    try:
        index = load_shards(manifest)
    except FormatError as error:
        return {}, [Finding("error", "manifest", str(error), "pack its datasets again")]
    files: dict[str, list[Finding]] = {}
    damaged = []
    with Work(f"reading {counted(len(index.shards), 'dataset')}") as work:
        for number, shard in enumerate(index.shards):
            found = verify_shard(index, number, tokens=tokens)
            if any(map(has_errors, found.values())):
                damaged.append(f"{number} ({shard.prefix})")
            files |= found
            work(number + 1, len(index.shards))
    if not damaged:
        return files, [Finding("note", "shards", counted(len(index.shards), "sound dataset"))]
    text = f"{len(damaged)} of {counted(len(index.shards), 'dataset')} are damaged: "
    return files, [Finding("error", "shards", text + ", ".join(damaged), "see below")]


def print_findings(findings: list[Finding]) -> None:
    """One line each, and what helps."""
    for finding in findings:
        remedy = f"\n           -> {finding.remedy}" if finding.remedy else ""
        print(f"  {finding.severity:7}  {finding.message}{remedy}")
