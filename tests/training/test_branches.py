"""Checkpoints for teams: milestones, branches from them, a mirror in an object store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from megapack.cli.main import main as build
from megapack.data.run import read_decisions
from megapack.errors import ConfigError, ResumeError
from megapack.storage.locks import FOLDER_MARK
from megapack.storage.metadata import file_checksum
from megapack.storage.remote.client import put_object
from megapack.training.config import CheckpointConfig
from megapack.training.engine.directory import CheckpointManifest, FileFacts, RunDirectory, step_of
from megapack.training.engine.mirror import Mirror
from megapack.training.engine.world import RankProgress
from megapack.training.start import check_branch, check_directory

from .conftest import NewRun, Run, drawn_from

pytestmark = pytest.mark.multiprocess


def _sections(**checkpoint: Any) -> dict[str, Any]:
    every = {"every": 2, "keep": 1, "export": False, "asynchronous": False, **checkpoint}
    return {"num_steps": 12, "evaluation": {"every": None}, "checkpoint": every}


def _steps(run: Run) -> list[int]:
    """Return the steps of the run's checkpoints."""
    return [int(tag.split("_")[1]) for tag in run.tags()]


def _sums(run_dir: Path) -> dict[str, str]:
    return {str(p): file_checksum(p) for p in sorted(run_dir.rglob("*")) if p.is_file()}


def _written(directory: Path, **files: Any) -> None:
    """Write a manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    facts = {name: FileFacts(**entry) for name, entry in files.items()}
    step = step_of(directory.name)
    CheckpointManifest(step=step, world_size=1, zero_stage=1, state={}, files=facts).write(
        directory
    )


@pytest.fixture(scope="module")
def trunk(module_run: NewRun) -> Run:
    run = module_run(**_sections(keep_every=4, keep_steps=[5]))
    run.succeed()
    return run


def test_milestones_are_kept_and_need_no_interval(trunk: Run) -> None:
    section = CheckpointConfig(every=None, keep_every=4, keep_steps=(5,))
    assert [step for step in range(1, 10) if section.is_due(step)] == [4, 5, 8]
    assert _steps(trunk) == [4, 5, 8, 12], "5 is in keep_steps, not a multiple of an interval"
    assert trunk.latest.startswith("step_00000012_")


@pytest.mark.parametrize("ranks", [2, 1])
def test_branch_continues_the_data_order_and_keeps_its_trunk(
    new_run: NewRun, trunk: Run, ranks: int
) -> None:
    milestone = trunk.checkpoints / "step_00000005_tokens_5120"
    # With other tokens per step, steps count anew: another checkpoint of this step, damaged.
    milestone.with_name("step_00000005_tokens_9999").mkdir(exist_ok=True)
    before = _sums(trunk.dir)
    decay = {"kind": "wsd", "decay_fraction": 0.5, "warmup_steps": 2}
    run = new_run(learning_rate=decay, **_sections(branch_from=str(milestone)))
    anew = "checkpoint.resume=never"  # the branch has no checkpoints yet
    message = f"continuing at step 5 from {milestone.name}"
    run.start(anew, "stop_at=9", ranks=ranks).succeed(message)
    # Checkpoints of the branch take precedence over the trunk's.
    run.start(ranks=ranks).succeed("continuing at step 9")
    ours, theirs = run.log, trunk.log
    assert [line["samples"] for line in ours] == [line["samples"] for line in theirs]
    assert [line["loss"] for line in ours[:5]] == [line["loss"] for line in theirs[:5]]
    assert ours[5]["loss"] == pytest.approx(theirs[5]["loss"], rel=1e-3)
    assert ours[-1]["lr"] != theirs[-1]["lr"], "the branch has another learning rate"
    assert _sums(trunk.dir) == before
    assert build(["audit", str(run.dir)]) == 0


def test_branch_without_checkpoint_is_refused_before_ranks_connect(
    new_run: NewRun, tmp_path: Path
) -> None:
    run = new_run(**_sections(branch_from=str(tmp_path / "step_00000003_x")))
    run.start(ranks=1).end_with(1, "manifest.json cannot be read")


def test_erased_disk_is_restored_from_the_mirror(
    new_run: NewRun, blend: Path, tmp_path: Path
) -> None:
    """The log is restored, too: the next mixture depends on it."""
    store = tmp_path / "store" / "run"
    store.parent.mkdir()
    drawn: dict[str, Any] = {"data": drawn_from(blend), "mixing": {"rule": "odm", "every": 5}}
    run = new_run(**drawn, **_sections(mirror=f"file://{store}", keep=2))
    whole = new_run("whole", **drawn, **_sections())
    env = {"MEGAPACK_CACHE": str(tmp_path / "cache")}
    run.succeed("stop_at=7", env=env)
    kept = sorted(p.name for p in store.glob("*.manifest.json"))
    assert [int(name.split("_")[1]) for name in kept] == _steps(run) == [6, 7]
    shutil.rmtree(run.dir)
    run.start(env=env).succeed("restored step_00000007", "continuing at step 7")
    whole.succeed()
    assert [line["loss"] for line in run.log] == [line["loss"] for line in whole.log]
    assert read_decisions(run.dir) == read_decisions(whole.dir)
    assert build(["audit", str(run.dir)]) == 0, "audit.jsonl is restored, too"
    after = sorted(p.name for p in store.glob("*.manifest.json"))
    # A damaged object is refused.
    shutil.rmtree(run.dir)
    newest = sorted(store.glob("step_*/*.pt"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    run.start(env=env).end_with(1, "a different checksum than when it was written")
    anew = run.start("checkpoint.resume=never", env=env)
    anew.end_with(2, "which this run would remove")
    assert sorted(p.name for p in store.glob("*.manifest.json")) == after


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mirror": "/local"}, r"mirror is '/local'; give an address"),
        ({"keep_every": 0}, "keep_every is 0"),
        ({"keep_steps": (0,)}, "keep_steps is 0"),
    ],
)
def test_invalid_checkpoint_section_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointConfig(**keys)


def test_branch_may_not_use_the_mirror_of_its_trunk(tmp_path: Path) -> None:
    """The branch would restore from that mirror, and remove the trunk's checkpoints."""
    origin = tmp_path / "trunk" / "checkpoints" / "step_00000002_tokens_9"
    _written(origin)
    (tmp_path / "trunk" / "config.yaml").write_text("checkpoint: {mirror: s3://bucket/run}")
    check_branch(origin, "s3://bucket/branch")
    check_branch(origin, None)
    with pytest.raises(ConfigError, match="which is the mirror of the run that this one branches"):
        check_branch(origin, "s3://bucket/run/")


def test_mirror_belongs_to_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: copies of a second run removed the checkpoints of the first."""
    monkeypatch.setenv("MEGAPACK_CACHE", str(tmp_path / "cache"))
    mirror = Mirror(f"file://{tmp_path}/store")

    def copy(run: str, tag: str) -> None:
        path = tmp_path / run / "checkpoints" / tag
        _written(path)
        mirror.copy(path.parent, [tag], tag)
        mirror.keep_only(path.parent, [tag])
        mirror.wait()

    def check(run: str) -> None:
        section = CheckpointConfig(mirror=mirror.address)
        check_directory(section, RunDirectory(tmp_path / run))

    check("first")
    copy("first", "step_00000002_tokens_9")
    copy("second", "step_00000003_tokens_12")
    assert mirror.tags() == ["step_00000002_tokens_9"]
    assert "is that of another run" in caplog.text
    with pytest.raises(ConfigError, match=r"mirror is file.*another run than .*give another addr"):
        check("second")
    (tmp_path / "first").rename(tmp_path / "moved")
    check("moved")
    mirror.restore(tmp_path / "restored" / "checkpoints")
    for run in ("restored", "moved"):
        copy(run, "step_00000004_tokens_18")
        check(run)
    assert mirror.tags() == ["step_00000004_tokens_18"]


def test_mirror_uploads_the_manifest_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint in the mirror is complete or absent; abandoned ones are removed."""
    directory, store = tmp_path / "checkpoints", tmp_path / "store"
    others = store / "run" / "corpus_7.manifest.json"  # of an unrelated dataset
    others.parent.mkdir(parents=True)
    others.write_text("{}")
    progress = RankProgress()
    mirror = Mirror(f"file://{store}/run", progress)
    tags = ["step_00000002_tokens_9", "step_00000004_tokens_18"]

    def copy(tag: str) -> None:
        mirror.copy(directory, tags, tag)
        mirror.wait()

    for tag, name in zip(tags, ("gone.pt", "there.pt"), strict=True):
        _written(directory / tag, **{name: {"bytes": 1, "xxh3": "0"}})
        (directory / tag / "there.pt").write_bytes(b"x")
        copy(tag)
    assert mirror.tags() == tags[1:], "a file of the first is unreadable"
    # The same step after a rollback: a mixture of both uploads must not have a manifest.
    (directory / tags[1] / "there.pt").unlink()
    copy(tags[1])
    assert mirror.tags() == []
    for tag, name in zip(tags, ("one.pt", "two.pt"), strict=True):
        path = directory / tag / name
        path.write_bytes(bytes(12 << 20))
        _written(directory / tag, **{name: {"bytes": 12 << 20, "xxh3": file_checksum(path)}})
        copy(tag)
    lost = tmp_path / "lost" / "checkpoints"
    monkeypatch.setenv("MEGAPACK_CACHE", str(tmp_path / "cache"))
    assert [mirror.restore(lost, at_most) for at_most in (8, 17, None)] == [None, *tags]
    # A large file counts as progress during upload and download.
    assert progress.signs >= 6
    parts: list[int] = []
    put_object(f"file://{store}/large", directory / tags[1] / "two.pt", lambda: parts.append(1))
    assert len(parts) >= 3
    # A checkpoint during an upload is skipped, unless it is the last one.
    mirror.keep_only(directory, [])
    gate = Event()
    monkeypatch.setattr(
        "megapack.storage.remote.client.put_object", lambda *a: gate.wait() and put_object(*a)
    )
    for tag in tags:
        mirror.copy(directory, tags, tag)
    gate.set()
    mirror.wait()
    assert mirror.tags() == tags
    mirror.keep_only(directory, [])
    mirror.wait()
    assert mirror.tags() == [] and others.exists()


def test_checkpoints_of_a_mirror_are_ordered_by_tokens_seen(tmp_path: Path) -> None:
    """A resume with other tokens per step counts steps anew."""
    tags = ["step_00000009_tokens_900", "step_00000002_tokens_1800", "step_00000010_tokens_10000"]
    for tag in reversed(tags):
        (tmp_path / f"{tag}.manifest.json").write_text("{}")
    assert Mirror(f"file://{tmp_path}").tags() == tags


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 99}, "version is 99; it must be one of 1"),
        ({"step": "seven"}, "step is 'seven'; it must be of type int"),
        ({"step": 3}, "step is 3, but the checkpoint is named step_00000002"),
        ({"files": [1]}, "files is .1.; it must be a mapping"),
        ({"files": {"a": {"bytes": 1}}}, "missing key 'xxh3'"),
        (
            {"files": {"../../victim": {"bytes": 1, "xxh3": "0"}}},
            "'../../victim'; it",
        ),
    ],
    ids=str,
)
def test_invalid_manifest_is_refused_and_restores_nothing(
    change: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = "step_00000002_tokens_9"
    manifest = tmp_path / "store" / "run" / f"{tag}.manifest.json"
    _written(manifest.parent / tag)
    tree = json.loads((manifest.parent / tag / "manifest.json").read_text()) | change
    for path in (manifest, manifest.parent / tag / "manifest.json"):
        path.write_text(json.dumps(tree))
    (manifest.parent / "victim").write_text("x")
    with pytest.raises(ResumeError, match=named):
        CheckpointManifest.read(manifest.parent / tag)
    monkeypatch.setenv("MEGAPACK_CACHE", str(tmp_path / "cache"))
    lost = tmp_path / "lost" / "checkpoints"
    with pytest.raises(ResumeError, match=named):
        Mirror(f"file://{manifest.parent}").restore(lost)
    names = {path.name for path in lost.rglob("*") if path.is_file()}
    assert names == {FOLDER_MARK, "manifest.json"}
    assert not list((tmp_path / "lost").glob("victim"))
