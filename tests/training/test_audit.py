"""megapack-build audit: a run's records prove what it was trained on, and show every change."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import build, printed
from peers import peer

from megapack.packing import SampleIndex
from megapack.training.engine.directory import Record, RunDirectory, append_jsonl, read_jsonl

from .conftest import Corpus, NewRun, Run, drawn_from, make_corpus, write_blend
from .processes import Zygote

pytestmark = pytest.mark.multiprocess

NUM_BITS = int(os.environ.get("MEGAPACK_BITS", "300"))
GONE = [3, 5, 8]  # documents of web that steps from 4 on mask
NUM_STEPS = 8


@pytest.fixture(scope="module")
def trained(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two sources that stopped after five steps and was resumed by another world size."""
    corpus = make_corpus(tmp_path_factory.mktemp("audited"))
    np.save(corpus.directory / "gone.npy", GONE)
    Path(f"{corpus.valid}.meta.json").unlink()  # like a dataset of another tool
    stages = [{"from_step": 4, "exclude": {"web": "gone.npy"}}]
    blend = write_blend(corpus.directory / "blend.yaml", corpus, stages=stages)
    config = corpus.config(
        corpus.directory / "run",
        num_steps=NUM_STEPS,
        model={"preset": "llama_tiny", "vocab_size": 64},
        data=drawn_from(blend),
        checkpoint={"every": 3, "keep": 2, "export": True},
        logging={"every": 2, "tensorboard": True, "batches": True},
    )
    run = Run(zygote, corpus.directory / "run", config)
    run.succeed("stop_at=5")
    run.succeed(ranks=1)
    return run


@pytest.fixture
def copied(trained: Run, tmp_path: Path) -> Path:
    """A copy of the run's directory; its data are shared."""
    return Path(shutil.copytree(trained.dir, tmp_path / "run"))


def audit(run_dir: Path, *words: object, status: int = 0) -> dict[str, Any]:
    done = build("audit", run_dir, "--json", *words)
    assert done.returncode == status, (done.stdout, done.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["proven"] == (status == 0 and "--answer-only" not in words)
    return answer


def findings(run_dir: Path, *words: object) -> str:
    """Return the codes and messages of the errors of an audit that fails."""
    listed = audit(run_dir, *words, status=1)["findings"]
    errors = [f"{f['code']}: {f['message']}" for f in listed if f["severity"] == "error"]
    return "\n".join(errors)


def trained_documents(run: Run) -> dict[tuple[str, int], set[int]]:
    """Return (source, document) -> steps, from the samples that the ranks logged."""
    folder = run.dir.parent
    indices = {n: SampleIndex.load(folder / f"{n}.samples") for n in ("train", "valid")}
    used: dict[tuple[str, int], set[int]] = {}
    for path in run.dir.glob("batches/*.jsonl"):
        for line in read_jsonl(path):
            for number in line["sample_ids"]:
                split = indices["train"].num_samples
                is_web = number < split
                index = indices["train" if is_web else "valid"]
                for document, _, _ in index.sample(number - (0 if is_web else split))[1]:
                    if not (is_web and document in GONE and line["step"] >= 4):
                        name = "web" if is_web else "math"
                        used.setdefault((name, document), set()).add(line["step"])
    return used


def test_resumed_run_is_proven_and_its_answers_are_those_of_the_ranks(trained: Run) -> None:
    used = trained_documents(trained)
    answer = audit(trained.dir)
    assert answer["num_steps"] == NUM_STEPS
    assert not [f for f in answer["findings"] if f["severity"] != "note"]
    assert sum(source["tokens"] for source in answer["sources"]) == NUM_STEPS * 1024
    some = sorted(used)[:: len(used) // 12]
    for source, document in [*some, *(("web", gone) for gone in GONE), ("web", 699)]:
        facts = audit(trained.dir, "--document", f"{source}:{document}", "--answer-only")
        steps = {step for sample in facts["document"]["samples"] for step in sample["steps"]}
        assert steps == used.get((source, document), set())
    text = printed("audit", trained.dir, "--document", "math:1")
    assert "document 1 of math in the first 8 steps" in text and text.endswith(": proven\n")
    events = [line["event"] for line in read_jsonl(trained.dir / "audit.jsonl")]
    assert (events[0], events[-1]) == ("start", "end") and events.count("start") == 2


def test_excluded_documents(trained: Run, tmp_path: Path) -> None:
    used = trained_documents(trained)
    unused = [d for d in range(700) if ("web", d) not in used]
    np.save(tmp_path / "unused.npy", unused)
    [row] = audit(trained.dir, "--excluded", f"web:{tmp_path / 'unused.npy'}")["excluded"]
    assert (row["num_documents"], row["draws"], row["last_step"]) == (len(unused), 0, None)
    last = max(used, key=lambda key: (key[0] == "web", max(used[key])))
    np.save(tmp_path / "one.npy", [*unused, last[1]])
    message = findings(trained.dir, "--excluded", f"web:{tmp_path / 'one.npy'}")
    assert (
        f"trained on documents of source {last[0]} {len(used[last])} times, the last time in step "
        f"{max(used[last])}" in message
    )
    answer = audit(trained.dir, "--excluded", trained.dir.parent / "valid", status=1)
    assert [row["source"] for row in answer["excluded"]] == ["math"]
    text = printed("audit", trained.dir, "--excluded", "web.npy", status=2)
    assert (
        "neither the prefix of a dataset nor SOURCE:FILE with one of the sources web, math" in text
    )


def test_dataset_that_no_source_has_was_not_trained(trained: Run, tmp_path: Path) -> None:
    other = make_corpus(tmp_path)
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{other.train}{suffix}", tmp_path / f"same{suffix}")
    assert audit(trained.dir, "--excluded", tmp_path / "same", status=1)["excluded"]
    from megapack.storage import IndexedDatasetBuilder  # noqa: PLC0415

    with IndexedDatasetBuilder(tmp_path / "foreign", np.uint16) as builder:
        builder.add_document([1, 2, 3])
    assert audit(trained.dir, "--excluded", tmp_path / "foreign")["excluded"] == []


def test_every_changed_bit_is_noticed(trained: Run, tmp_path: Path) -> None:
    """MEGAPACK_BITS=10000 changes that many, one at a time, in any file of the run and its data."""
    folder = Path(shutil.copytree(trained.dir.parent, tmp_path / "moved"))
    run = RunDirectory(folder / "run")
    data = ["blend.yaml", "gone.npy", "train.meta.json"]
    for name in ("train", "valid"):
        data += [f"{name}{suffix}" for suffix in (".bin", ".idx", ".samples")]
    _move_records(run, trained.dir.parent, folder)
    assert audit(run.path)["proven"]
    files = [path for path in sorted(run.path.rglob("*")) if path.is_file()]
    files = [path for path in [*files, *(folder / n for n in data)] if path.stat().st_size]
    assert {"audit.jsonl", "config.yaml", "latest", "model.safetensors"} <= {p.name for p in files}
    chance, unnoticed = random.Random(NUM_BITS), []
    for _ in range(NUM_BITS):
        path = chance.choice(files)
        content = path.read_bytes()
        bit = chance.randrange(8 * len(content))
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        if build("audit", run.path).returncode != 1:
            unnoticed.append((path, bit))
        path.write_bytes(content)
    assert not unnoticed
    assert audit(run.path)["proven"], "the files are as before"


def _move_records(run: RunDirectory, old: Path, new: Path) -> None:
    """Record the data of a copied run under their new paths, and its configuration again."""
    run.config.write_text(run.config.read_text().replace(str(old), str(new)))
    inputs = Record.total(run.audit).inputs
    moved = {path.replace(str(old), str(new)): facts for path, facts in inputs.items()}
    lines = list(read_jsonl(run.audit))
    for line in lines:
        line["inputs"] = {}
    run.audit.unlink()
    append_jsonl(run.audit, *lines)
    run.record("start", moved)


def _edit(path: str, change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    def edit(run_dir: Path) -> None:
        lines = (run_dir / path).read_bytes().splitlines(keepends=True)
        (run_dir / path).write_bytes(b"".join(change(lines)))

    return edit


def _change(line: bytes) -> bytes:
    return line.replace(b'"lr": ', b'"lr": 1')


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a line is missing": (
        _edit("log.jsonl", lambda x: x[:3] + x[4:]),
        "lacks the line before it: line 4",
    ),
    "lines are swapped": (_edit("log.jsonl", lambda x: [x[1], x[0], *x[2:]]), "line 1 (and"),
    "the last line is missing": (_edit("log.jsonl", lambda x: x[:-1]), "no longer contains the"),
    "a line is added": (
        lambda run: append_jsonl(run / "log.jsonl", {"step": 8}),
        "bytes, and audit.jsonl records",
    ),
    "a value is changed": (_edit("log.jsonl", lambda x: [_change(x[0]), *x[1:]]), ": line 1"),
    "an evaluation is missing": (_edit("evaluation.jsonl", lambda _: []), "evaluation.jsonl no"),
    "the first record is missing": (
        _edit("audit.jsonl", lambda x: x[1:]),
        "audit.jsonl has a changed line",
    ),
    "the last record is missing": (_edit("audit.jsonl", lambda x: x[:-1]), "end.json has"),
    "a log is removed": (lambda run: (run / "starts.jsonl").unlink(), "starts.jsonl is missing"),
    "the model is removed": (lambda run: (run / "model/config.json").unlink(), "is missing"),
    "weights are removed": (
        lambda run: next(run.glob("checkpoints/*/*.pt")).unlink(),
        "checkpoint: ",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_named(copied: Path, name: str) -> None:
    change, message = CHANGES[name]
    change(copied)
    assert message in findings(copied)


def test_consistent_change_of_program_and_records_contradicts_the_log(copied: Path) -> None:
    run = RunDirectory(copied)
    run.config.write_text(run.config.read_text().replace("seed: 0", "seed: 1"))
    run.record("end")
    assert "step 0 was trained on samples or labels that differ" in findings(copied)


def test_changed_exclusions_contradict_the_label_tokens_of_the_log(
    trained: Run, tmp_path: Path
) -> None:
    """Without the stage that masks documents, every step has the same samples."""
    corpus = Corpus(trained.dir.parent)
    blend = write_blend(tmp_path / "blend.yaml", corpus)
    changed = findings(trained.dir, "--set", f"data.blend={blend}")
    assert re.search(r"step: step [4-7] was trained on samples or labels that differ", changed)


def test_step_without_a_line_is_named(copied: Path) -> None:
    """The chain and the records are consistent: the log was written again without a step."""
    run = RunDirectory(copied)
    lines = list(read_jsonl(run.log))
    run.log.unlink()
    append_jsonl(run.log, *lines[:3], *lines[4:])
    run.record("end")
    assert findings(copied) == "step: log.jsonl has no line for step 3 (1 are missing)"


def test_file_that_nobody_recorded_is_a_warning(copied: Path) -> None:
    (copied / "notes.txt").write_text("mine")
    [warning] = [f for f in audit(copied)["findings"] if f["severity"] == "warning"]
    assert "notes.txt is not recorded" in warning["message"]


def test_run_of_an_earlier_version_is_not_proven(copied: Path) -> None:
    (copied / "audit.jsonl").unlink()
    for path in copied.rglob("*.jsonl"):
        lines = list(read_jsonl(path))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = audit(copied, status=1)
    [missing] = [f for f in answer["findings"] if f["severity"] == "error"]
    assert missing["code"] == "not-recorded" and "earlier version" in missing["message"]
    assert answer["num_steps"] == NUM_STEPS and answer["sources"], "its questions are answered"
    append_jsonl(copied / "log.jsonl", {"step": 8})  # by this version, which resumes the run
    RunDirectory(copied).record("start")
    message = f"log.jsonl has {NUM_STEPS} lines without a chain, written by an earlier version"
    assert message in findings(copied)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Return the paths of a private key, which signs, and of its public key."""
    peer("cryptography")
    from cryptography.hazmat.primitives import serialization as s  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415
        Ed25519PrivateKey,
    )

    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    key = Ed25519PrivateKey.generate()
    plain = s.NoEncryption()
    private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, plain))
    pem = s.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, pem))
    return private, public


def test_signature_shows_a_change_of_files_and_records(
    copied: Path, keys: tuple[Path, Path]
) -> None:
    private, public = keys
    other_key = public.with_name("other.pub")
    der = public.read_text().splitlines()
    other_key.write_text("\n".join([der[0], der[1][:-6] + "AAAAA=", der[2]]))
    assert "was not signed" in findings(copied, "--key", public)
    audit(copied, "--sign", private)
    audit(copied, "--key", public)
    assert "was not signed with" in findings(copied, "--key", other_key)
    statement = copied / "statement.json"
    envelope = json.loads(statement.read_text())
    statement.write_text(json.dumps({**envelope, "payload": envelope["payload"][4:]}))
    assert "or was changed" in findings(copied, "--key", public)
    statement.write_text(json.dumps(envelope))
    run = RunDirectory(copied)
    (copied / "model" / "config.json").write_text("{}")
    run.record("export")  # the records are repaired, too
    audit(copied)
    assert "config.json is missing, or is not the file that was signed" in findings(
        copied, "--key", public
    )


def test_other_programs_can_verify_a_statement(copied: Path, keys: tuple[Path, Path]) -> None:
    """The signature is that of DSSE, over an in-toto statement of every file and all tokens."""
    private, public = keys
    audit(copied, "--sign", private)
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    envelope = json.loads((copied / "statement.json").read_text())
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
    signed = b" ".join([b"DSSEv1", b"%d" % len(kind), kind, b"%d" % len(payload), payload])
    key: Any = load_pem_public_key(public.read_bytes())
    key.verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed)
    digests = {s["name"]: s["digest"]["sha256"] for s in json.loads(payload)["subject"]}
    for name, digest in digests.items():
        assert hashlib.sha256((copied / name).read_bytes()).hexdigest() == digest
    run = RunDirectory(copied)
    weights = {p.relative_to(copied).as_posix() for p in run.checkpoints.glob("*/*.pt")}
    assert weights and weights | set(run.recorded_names()) <= digests.keys()
    prefix = Path(next(name for name in digests if name.endswith("train.meta.json")))
    assert {str(prefix.with_name(f"train{end}")) for end in (".bin", ".idx")} <= digests.keys()


def test_keys_that_cannot_sign(copied: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    (tmp_path / "short").write_bytes(b"x" * 31)
    text = printed("audit", copied, "--sign", tmp_path / "short", status=2)
    assert "is not a readable PEM key" in text and "openssl genpkey" in text
    assert "not a private Ed25519 key" in printed("audit", copied, "--sign", public, status=2)
    assert "leave out --answer-only" in printed(
        "audit", copied, "--sign", private, "--answer-only", status=2
    )


def test_killed_run_is_proven_up_to_its_last_line(new_run: NewRun) -> None:
    run = new_run(checkpoint={"every": 3, "keep": 1}, logging={"every": 1, "tensorboard": True})
    ranks = run.start(faults={0: {"kill_before_step": [7]}})
    assert -signal.SIGKILL in ranks.wait()
    answer = audit(run.dir)
    assert answer["num_steps"] == 7
    assert [f["code"] for f in answer["findings"]] == ["running"]
    with (run.dir / "log.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "sam')  # a write that the kill cut short
    assert audit(run.dir)["num_steps"] == 7
    text = (run.dir / "log.jsonl").read_bytes()
    (run.dir / "log.jsonl").write_bytes(text.replace(b'"step": 6', b'"step": 9'))
    assert "line 7" in findings(run.dir), "lines after the last record are chained"
    (run.dir / "log.jsonl").write_bytes(text)
    run.succeed()
    assert audit(run.dir)["num_steps"] == 8
