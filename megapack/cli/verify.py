"""Check datasets, .samples files and shard manifests for damage.

  megapack-build verify corpus
  megapack-build verify corpus.samples
  megapack-build verify web.shards.json
  megapack-build verify shards/ --no-tokens          # the index only: seconds instead of minutes
  megapack-build verify corpus --vocab-size 50257 --eod-token 50256

For a dataset it checks header, sizes, pointers, document indices, conflicting dtype tables,
checksums, the range of token ids, the ends of documents, and duplicates among the named datasets.
For a .samples file it checks all checksums and, if its dataset is found, that every segment lies
inside its document, and that prefix trees match its current tokens. For a shard manifest it checks
every shard, and the files of each against the manifest; it prints only shards with findings.
Datasets at addresses are fetched one at a time.
Exit status 1 if there are errors; warnings and notes do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import os

from megapack.cli.arguments import add_dataset_argument, add_shared, token_id
from megapack.cli.datasets import named_files
from megapack.cli.output import Work, print_result
from megapack.errors import FormatError, MegapackError
from megapack.packing import SampleIndex
from megapack.packing.sharded import SUFFIX, load_shards
from megapack.packing.verify import prefix_of_samples, verify_samples, verify_shard
from megapack.storage.survey import remedy_for
from megapack.storage.verify import Finding, find_duplicates, has_errors, verify
from megapack.units import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_argument(parser, many=True, help="or .samples files, or shard manifests")
    add_shared(parser, "--no-tokens")
    add_shared(parser, "--vocab-size", help="larger ids are errors (default: from the meta file)")
    add_shared(
        parser,
        "--eod-token",
        help="token with which every non-empty document must end (default: from the meta file)",
    )
    add_shared(parser, "--tokenizer", help="needed if --eod-token is a name")
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
    findings |= {name: verify_samples(name, tokens=not args.no_tokens) for name in names}
    for name in names if prefixes else ():
        findings[name] += _not_named(name, prefixes)
    named = {*findings, *manifests}
    for manifest in manifests:
        shards, findings[manifest] = verify_source(manifest, tokens=not args.no_tokens)
        findings |= shards
    datasets = [name for name in findings if not name.endswith((".samples", SUFFIX))]
    for prefix, duplicate in find_duplicates(datasets).items():
        findings[prefix].append(duplicate)

    def show() -> None:
        for name, listed in findings.items():
            if name in named or any(finding.severity != "note" for finding in listed):
                codes = {finding.code for finding in listed if finding.severity == "error"}
                verdict = "MISSING" if codes == {"missing"} else "DAMAGED" if codes else "sound"
                print(f"{name}: {verdict}")
                print_findings(listed, name)

    facts = {p: [dataclasses.asdict(f) for f in listed] for p, listed in findings.items()}
    print_result(args, facts, show, indent=None)
    return int(any(map(has_errors, findings.values())))


def _not_named(name: str, prefixes: list[str]) -> list[Finding]:
    """Return a note if the dataset of a .samples file, with which it was compared, is not one of
    the datasets on the command line."""
    try:
        prefix = prefix_of_samples(name, SampleIndex.load(name))
    except (MegapackError, OSError):  # reported by verify_samples
        return []
    if os.path.realpath(prefix) in map(os.path.realpath, prefixes):
        return []
    text = f"{name} was packed from {prefix} and compared with it, not with {', '.join(prefixes)}"
    return [Finding("note", "other-dataset", text)]


def verify_source(manifest: str, *, tokens: bool) -> tuple[dict[str, list[Finding]], list[Finding]]:
    """Return the findings about the files of all shards, and those about the manifest."""
    try:
        index = load_shards(manifest)
    except FormatError as error:
        return {}, [Finding("error", "manifest", str(error), "pack its datasets again")]
    files: dict[str, list[Finding]] = {}
    damaged = []
    with Work(f"reading {counted(len(index.shards), 'dataset')}") as work:
        for number, shard in enumerate(index.shards):
            findings = verify_shard(index, number, tokens=tokens)
            if any(map(has_errors, findings.values())):
                damaged.append(f"{number} ({shard.prefix})")
            files |= findings
            work(number + 1, len(index.shards))
    if not damaged:
        return files, [Finding("note", "shards", counted(len(index.shards), "sound dataset"))]
    text = f"{len(damaged)} of {counted(len(index.shards), 'dataset')} are damaged: "
    return files, [Finding("error", "shards", text + ", ".join(damaged), "see below")]


def print_findings(findings: list[Finding], prefix: str = "PREFIX") -> None:
    """Print findings; commands that repair a dataset name it."""
    for finding in findings:
        remedy = f"\n           -> {remedy_for(finding, prefix)}" if finding.remedy else ""
        print(f"  {finding.severity:7}  {finding.message}{remedy}")
