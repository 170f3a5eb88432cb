"""Prove what a run was trained on: that no recorded bit has changed, and which documents it used.

RUN is a run directory. The run records checksums of its files and of its data at every
start, checkpoint and end (audit.jsonl), and chains the lines of its logs by SHA-256. audit compares
all of them, then computes every step again and compares it with log.jsonl: samples and label
tokens. Finally it reports how often the program repeated each source. Further questions:

--document SOURCE:D shows the steps that trained on document D of a source.
--excluded LIST checks that no step trained on documents: SOURCE:FILE (a .npy or text file of
document numbers), or the PREFIX of a dataset.
--answer-only skips all comparisons and answers from the current files.

Checksums reveal damage and mistakes, but not a deliberate change of a file and its records. So
--sign KEY writes RUN/statement.json, an in-toto statement with the answers and the SHA-256 of every
file of the run and of its data, in a DSSE envelope; --key KEY compares everything with it. KEY is a
PEM file with an Ed25519 key (package cryptography); the public key suffices for --key.

Exit status 1 if something differs or is not recorded, or if the run trained on an excluded
document.

examples:
  megapack-build audit runs/a
  megapack-build audit runs/a --document web:81723 --excluded web:takedown.npy --json
  megapack-build audit runs/a --excluded benchmarks/mmlu --sign company.pem
  megapack-build audit runs/a --key company.pub.pem
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megapack import __version__
from megapack.cli.arguments import add_flags, add_shared
from megapack.cli.output import Screen, Work, print_result, print_table
from megapack.cli.trace import document_facts, print_document
from megapack.cli.verify import print_findings, verify_source
from megapack.config import load_config
from megapack.errors import ConfigError, FormatError, MegapackError, require
from megapack.packing.sharded import is_shard_manifest, load_shards
from megapack.packing.verify import verify_samples
from megapack.records import parse_json
from megapack.storage import IndexedDataset
from megapack.storage.address import is_remote
from megapack.storage.dataset import read_documents
from megapack.storage.files import atomic_write, open_regular, read_array_blocks
from megapack.storage.verify import Finding, has_errors, verify
from megapack.training.engine.directory import (
    MANIFEST,
    STATEMENT,
    CheckpointManifest,
    Record,
    RunDirectory,
    chain_problems,
    last_line,
    read_jsonl,
)

if TYPE_CHECKING:
    from megapack.data import Schedule
    from megapack.data.run import OpenRun

MOST_STEPS = 10_000  # recomputed steps; in longer runs, evenly spaced ones
_META = ".meta.json"
_PAYLOAD = "application/vnd.in-toto+json"
_RESTORE = "restore it from a copy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    add_shared(parser, "--set")
    add_shared(parser, "--document")
    parser.add_argument(
        "--excluded",
        metavar="LIST",
        action="append",
        default=[],
        help="documents that the run must not have trained on",
    )
    add_shared(parser, "--no-tokens")
    add_flags(parser, answer_only="answer without comparing files and steps with the records")
    parser.add_argument("--sign", metavar="KEY", help=f"write RUN/{STATEMENT}, signed")
    parser.add_argument("--key", metavar="KEY", help=f"compare everything with RUN/{STATEMENT}")
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> int:
    if args.answer_only and (args.sign or args.key):
        raise ConfigError("--sign and --key need a full audit: leave out --answer-only")
    run = RunDirectory(args.run)
    if not run.config.exists():
        raise ConfigError(f"{args.run} is not the directory of a run: it has no {run.config.name}")
    findings: list[Finding] = []
    if not args.answer_only:
        findings += check_run(run, tokens=not args.no_tokens)
    if args.key:
        findings += check_statement(run, args.key)
    answers: dict[str, Any] = {}
    # A damaged configuration may demand any amount of work: compute nothing from it.
    if all(f.code == "not-recorded" for f in findings if f.severity == "error"):
        more, answers = _answers(args, run)
        findings += more
    if args.sign and not has_errors(findings):
        sign_statement(run, args.sign, answers, tokens=not args.no_tokens)
    is_proven = not (has_errors(findings) or args.answer_only)
    has_warnings = any(finding.severity == "warning" for finding in findings)

    def show() -> None:
        print_answers(answers)
        print_findings(findings)
        verdict = "proven, except for the warnings" if has_warnings else "proven"
        verdict = verdict if is_proven else "NOT PROVEN"
        print(f"{run.path}: {'not compared (--answer-only)' if args.answer_only else verdict}")

    listed = [dataclasses.asdict(finding) for finding in findings]
    print_result(args, {"proven": is_proven, **answers, "findings": listed}, show)
    return int(has_errors(findings))


# ---- Files: does every bit equal its record? -----------------------------------------------------


def check_run(run: RunDirectory, *, tokens: bool = True) -> list[Finding]:
    """Compare the files of a run, its checkpoints and its data with their records."""
    if not run.audit.exists():
        text = (
            f"{run.path} has no {run.audit.name}: an earlier version of megapack wrote the run, so "
            "its configuration, logs, checkpoints, model and data cannot be proven to be those of "
            "the training; steps are compared with the current log.jsonl"
        )
        return [
            Finding("error", "not-recorded", text),
            *check_checkpoints(run, run.recorded_names()),
        ]
    may_grow = not run.has_ended
    findings = [
        Finding("error", "log", f"{run.audit} {problem}", _RESTORE)
        for problem in chain_problems(run.audit, None, may_grow=may_grow)
    ]
    try:
        record = Record.total(run.audit)
    except FormatError as error:
        return [*findings, Finding("error", "log", str(error), _RESTORE)]
    if may_grow:
        text = "the run failed, was killed or still runs: only the chain covers its last lines"
        findings.append(Finding("note", "running", text))
    findings += check_files(run, record, may_grow=may_grow)
    findings += check_checkpoints(run, record.files)
    findings += check_inputs(record, tokens=tokens)
    return findings


def check_files(run: RunDirectory, record: Record, *, may_grow: bool) -> Iterator[Finding]:
    for name, facts in record.files.items():
        # Other libraries append to the files of these folders.
        grows = may_grow and name.partition("/")[0] in ("tensorboard", "wandb", "profile", "flight")
        problem = facts.problem(run.path / name, "checksum", may_grow=grows)
        if problem is not None:
            yield Finding("error", "file", f"{run.path / name} {problem}", _RESTORE)
    for name, log in record.logs.items():
        path = run.path / name
        problems = chain_problems(path, log, may_grow=may_grow) if path.exists() else ["is missing"]
        for problem in problems:
            yield Finding("error", "log", f"{path} {problem}", _RESTORE)
    for name in run.recorded_names():
        if name not in record.files and name not in record.logs:
            text = f"{run.path / name} is not recorded: it was written after the run's last record"
            yield Finding("warning", "unlisted", text)


def check_checkpoints(run: RunDirectory, names: Iterable[str]) -> Iterator[Finding]:
    """Compare the files of all checkpoints with their manifests."""
    for folder in _checkpoints(run, names):
        try:
            manifest = CheckpointManifest.read(folder)
        except MegapackError as error:
            yield Finding("error", "checkpoint", str(error), _RESTORE)
            continue
        for name, facts in manifest.files.items():
            problem = facts.problem(folder / name, "checksum")
            if problem is not None:
                yield Finding("error", "checkpoint", f"{folder / name} {problem}", _RESTORE)


def _checkpoints(run: RunDirectory, names: Iterable[str]) -> list[Path]:
    paths = (run.path / name for name in names)
    return [p.parent for p in paths if p.name == MANIFEST and p.parent.parent == run.checkpoints]


def check_inputs(record: Record, *, tokens: bool) -> Iterator[Finding]:
    """Compare manifests, samples and datasets of the data with their records and checksums."""
    damaged = set()
    for name, facts in record.inputs.items():
        if problem := facts.problem(Path(name), "checksum"):
            damaged.add(name)
            yield Finding("error", "data", f"{name} {problem}", _RESTORE)
    if not tokens:
        yield Finding("warning", "not-compared", "tokens were not compared (--no-tokens)")
    intact = sorted(record.inputs.keys() - damaged)
    findings: list[Finding] = []
    in_manifests = set()
    for name in filter(is_shard_manifest, intact):
        files, of_source = verify_source(name, tokens=tokens)
        findings += [*of_source, *(finding for listed in files.values() for finding in listed)]
        in_manifests |= {
            str(Path(f"{s.prefix}{_META}").absolute()) for s in load_shards(name).shards
        }
    for name in sorted({*intact} - in_manifests):
        if name.endswith(".samples"):
            findings += verify_samples(name, tokens=tokens)
        elif name.endswith(_META):
            with Work(f"reading {name.removesuffix(_META)}") as work:
                findings += verify(name.removesuffix(_META), tokens=tokens, progress=work)
    yield from (finding for finding in findings if finding.severity == "error")


# ---- Steps: what did the run train on? -----------------------------------------------------------


def _answers(args: argparse.Namespace, run: RunDirectory) -> tuple[list[Finding], dict[str, Any]]:
    """Return findings about steps, data and excluded documents, and the answers as JSON."""
    from megapack.data import plan_run  # noqa: PLC0415 (torch)
    from megapack.data.run import OpenRun  # noqa: PLC0415
    from megapack.training.config import PretrainConfig  # noqa: PLC0415

    config = load_config(PretrainConfig, run.config, args.set)
    opened = OpenRun(dataclasses.replace(config, run_dir=str(run.path)))  # it may have moved
    schedule, num_steps = opened.schedule, logged_steps(run.log)
    document = args.document and document_facts(args.document, schedule, num_steps)
    findings: list[Finding] = []
    if not args.answer_only:
        trained = [step for s in (document or {"samples": ()})["samples"] for step in s["steps"]]
        findings += check_steps(schedule, num_steps, run.log, trained)
        findings += check_recorded(Record.total(run.audit), opened)
    excluded = [row for name in args.excluded for row in _excluded(name, opened, num_steps)]
    for row in excluded:
        if row["draws"]:
            text = (
                f"--excluded {row['list']}: the run trained on documents of source {row['source']} "
                f"{row['draws']:,} times, the last time in step {row['last_step']:,}"
            )
            findings.append(Finding("error", "excluded", text))
    sources = plan_run(schedule, num_steps).datasets if num_steps else ()
    return findings, {
        "num_steps": num_steps,
        "sources": [source._asdict() for source in sources],
        "document": document,
        "excluded": excluded,
    }


def logged_steps(log: Path) -> int:
    """Return the number of steps until the last line of a log, without reading the others."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        text, _ = last_line(file)
    return int(parse_json(text, log, remedy=_RESTORE)["step"]) + 1 if text else 0


def check_steps(
    schedule: Schedule, num_steps: int, log: Path, also: Iterable[int]
) -> Iterator[Finding]:
    """Recompute up to ``MOST_STEPS`` steps, and ``also``; compare them with their log lines."""
    lines = read_jsonl(log) if num_steps else ()
    logged = {line["step"]: (line["samples"], line["label_tokens"]) for line in lines}
    missing = sorted(set(range(num_steps)) - logged.keys())
    if missing:
        text = f"log.jsonl has no line for step {missing[0]:,} ({len(missing):,} are missing)"
        yield Finding("error", "step", text, _RESTORE)
    spaced = np.linspace(0, num_steps - 1, min(num_steps, MOST_STEPS)).astype(int).tolist()
    chosen, wrong = sorted(logged.keys() & {*spaced, *also}), []
    with Work(f"recomputing {len(chosen):,} of {num_steps:,} steps") as work:
        for number, step in enumerate(chosen, 1):
            content = schedule.step(step)
            if (content.checksum, content.num_label_tokens) != logged[step]:
                wrong.append(step)
            work(number, len(chosen))
    if wrong:
        text = (
            f"step {wrong[0]:,} was trained on samples or labels that differ from the program "
            f"({len(wrong):,} of {len(chosen):,} steps)"
        )
        yield Finding("error", "step", text, "restore the program and data of the run")
    elif len(chosen) < num_steps:
        text = f"{len(chosen):,} of {num_steps:,} steps were recomputed"
        yield Finding("note", "steps", text)


def check_recorded(record: Record, opened: OpenRun) -> Iterator[Finding]:
    """Name the datasets whose bytes are not recorded."""
    for source in opened.data.datasets:
        for prefix, _ in source.columns:
            files = (Path(f"{prefix}{suffix}").absolute() for suffix in (_META, ".bin"))
            if not any(str(file) in record.inputs for file in files):
                text = f"{prefix} is remote, or has no meta file: its tokens are not recorded"
                yield Finding("warning", "not-compared", text, "megapack-build import writes one")


def _excluded(name: str, run: OpenRun, num_steps: int) -> Iterator[dict[str, Any]]:
    """Yield how often the run trained on the documents of a list, per source that has some."""
    from megapack.data.report import draws_of  # noqa: PLC0415 (torch)

    for source, documents in _listed(name, run):
        num_samples, stages = draws_of(run.schedule, source, documents, num_steps)
        showing = [stage for stage in stages if stage.showing]
        yield {
            "list": name,
            "source": run.schedule.samples.names[source],
            "num_documents": len(documents),
            "num_samples": num_samples,
            "draws": sum(stage.showing for stage in showing),
            "last_step": showing[-1].last() if showing else None,
        }


def _listed(name: str, run: OpenRun) -> Iterator[tuple[int, Any]]:
    """Yield (source, documents) of ``SOURCE:FILE``, ``FILE``, or the prefix of a dataset."""
    samples = run.schedule.samples
    if not is_remote(name) and IndexedDataset.exists(name):
        fingerprint = IndexedDataset(name).fingerprint
        for source, index in enumerate(samples.indices):
            shards = getattr(index, "shards", None) or [run.data.datasets[source]]
            ends = np.cumsum([shard.num_documents for shard in shards])
            for shard, end in zip(shards, ends.tolist(), strict=True):
                if shard.fingerprint == fingerprint:
                    yield source, np.arange(end - shard.num_documents, end)
        return
    title, colon, path = name.partition(":")
    if not colon and len(samples.names) == 1:
        title, path = samples.names[0], name
    if samples.names.count(title) != 1:
        raise ConfigError(
            f"--excluded {name!r} is neither the prefix of a dataset nor SOURCE:FILE with one of "
            f"the sources {', '.join(samples.names[:20])}: give one of these"
        )
    yield samples.names.index(title), read_documents(path)


def print_answers(answers: dict[str, Any]) -> None:
    if not answers:
        return
    print(f"{answers['num_steps']:,} steps")
    columns: dict[str, Any] = {
        "source": lambda row: row["name"],
        "tokens": lambda row: f"{row['tokens']:,}",
        "epochs": lambda row: f"{row['epochs']:.3f}",
        "repeated": lambda row: f"{row['repeated']:.2%}",
    }
    print_table(columns, answers["sources"])
    if answers["document"]:
        print_document(answers["document"])
    for row in answers["excluded"]:
        last = "" if row["last_step"] is None else f", the last time in step {row['last_step']:,}"
        Screen().write_line(
            f"{row['num_documents']:,} documents of {row['source']} ({row['list']}): trained on "
            f"{row['draws']:,} times{last}"
        )


# ---- The signed statement ------------------------------------------------------------------------


def sign_statement(run: RunDirectory, key: str, answers: dict[str, Any], *, tokens: bool) -> None:
    """Write an in-toto statement (v1) of all files and the answers, in a DSSE envelope."""
    digests = {name: _sha256(path) for name, path in _subjects(run, tokens=tokens).items()}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": n, "digest": {"sha256": digest}} for n, digest in digests.items()],
        "predicateType": "urn:megapack:audit:1",
        "predicate": {"megapack": __version__, **answers},
    }
    payload = json.dumps(statement).encode()
    signature = base64.b64encode(_key(key, public=False).sign(_encoded(payload))).decode()
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": _PAYLOAD,
        "signatures": [{"sig": signature}],
    }
    with atomic_write(run.path / STATEMENT, "w") as file:
        json.dump(envelope, file)


def check_statement(run: RunDirectory, key: str) -> Iterator[Finding]:
    """Compare the signature with the key, then the SHA-256 of all files with the statement."""
    exceptions = require("cryptography.exceptions", f"--key {key}")
    path, public = run.path / STATEMENT, _key(key, public=True)
    try:
        envelope = parse_json(path.read_bytes(), path, remedy=_RESTORE)
        payload = base64.b64decode(envelope["payload"], validate=True)
        signature = base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
        public.verify(signature, _encoded(payload))
    except exceptions.InvalidSignature:
        text = f"{path} was not signed with the key in {key}, or was changed"
        yield Finding("error", "signature", text)
        return
    except FileNotFoundError:
        text = f"{path} does not exist: the run was not signed"
        yield Finding("error", "signature", text, "sign it with --sign")
        return
    except (LookupError, TypeError, ValueError) as error:
        yield Finding("error", "signature", f"{path} is damaged ({error})", _RESTORE)
        return
    for subject in json.loads(payload)["subject"]:
        path = run.path / subject["name"]  # an absolute name stays absolute
        if not path.exists() or _sha256(path) != subject["digest"]["sha256"]:
            text = f"{path} is missing, or is not the file that was signed"
            yield Finding("error", "signature", text, _RESTORE)


def _subjects(run: RunDirectory, *, tokens: bool) -> dict[str, Path]:
    """Return the files of a run, of its checkpoints and of its data, by name."""
    record = Record.total(run.audit)
    paths = [run.audit, *(run.path / name for name in (*record.files, *record.logs))]
    for folder in _checkpoints(run, record.files):
        paths += [folder / name for name in CheckpointManifest.read(folder).files]
    named = {path.relative_to(run.path).as_posix(): path for path in paths}
    data = list(map(Path, record.inputs))
    for path in map(Path, record.inputs):
        if is_shard_manifest(path):
            data += [Path(shard.samples) for shard in load_shards(path).shards]
        elif path.name.endswith(_META):
            prefix = path.name.removesuffix(_META)
            files = (p for p in path.parent.iterdir() if p.name.startswith(f"{prefix}."))
            suffixes = (".idx", ".bin", ".col") if tokens else (".idx",)
            data += [file for file in files if file.name.endswith(suffixes)]
    return named | {str(path): path for path in data if not is_remote(str(path))}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        for block in read_array_blocks(file, np.uint8, path.stat().st_size, 1 << 20):
            digest.update(block.data)
    return digest.hexdigest()


def _encoded(payload: bytes) -> bytes:
    """Return the bytes that DSSE signs (pre-authentication encoding, version 1)."""
    return b"DSSEv1 %d %b %d %b" % (len(_PAYLOAD), _PAYLOAD.encode(), len(payload), payload)


def _key(path: str, *, public: bool) -> Any:
    """Return the private or the public Ed25519 key of a PEM file. Raises ConfigError."""
    option, primitives = f"--{'key' if public else 'sign'} {path}", "cryptography.hazmat.primitives"
    serialization = require(f"{primitives}.serialization", option)
    ed25519 = require(f"{primitives}.asymmetric.ed25519", option)
    content = Path(path).read_bytes()
    remedy = "write one with openssl genpkey -algorithm ed25519 -out key.pem"
    try:
        if b"PUBLIC KEY" in content:
            key: Any = serialization.load_pem_public_key(content)
        else:
            key = serialization.load_pem_private_key(content, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a readable PEM key ({error}): {remedy}") from error
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.public_key() if public else key
    if public and isinstance(key, ed25519.Ed25519PublicKey):
        return key
    kind = "an" if public else "a private"
    raise ConfigError(f"{path} is {type(key).__name__}, not {kind} Ed25519 key: {remedy}")
