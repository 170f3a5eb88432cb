"""A checkpoint is written while training goes on: it holds its step, and counts when whole."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import Corpus
from .processes import Zygote, read_log, start_run, wait_for

EVERY_THREE = {"every": 3, "keep": 3}
THIRD, SIXTH = "step_00000003_tokens_3072", "step_00000006_tokens_6144"


@pytest.fixture(scope="module")
def blocking(zygote: Zygote, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that waits for its checkpoints."""
    run_dir = tmp_path_factory.mktemp("blocking") / "run"
    config = corpus.config(run_dir, checkpoint={**EVERY_THREE, "asynchronous": False})
    start_run(zygote, config, "blocking").succeed()
    return run_dir


def _gated(gate: Path, tag: str) -> dict[int, dict[str, Any]]:
    faults = {"writes_wait_for": [str(gate), tag]}
    return {0: {"faults": faults}, 1: {"faults": faults}}


def _wait_for_step(run_dir: Path, step: int) -> None:
    fed = [run_dir / "batches" / f"rank_0000{rank}.jsonl" for rank in (0, 1)]
    wait_for(lambda: all(p.exists() and f'"step": {step}' in p.read_text() for p in fed), "steps")


def _assert_same(ours: Any, theirs: Any, where: str) -> None:
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in ours.items():
            _assert_same(value, theirs[key], f"{where}/{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            _assert_same(a, b, f"{where}/{i}")


def test_steps_go_on_meanwhile(
    zygote: Zygote, corpus: Corpus, blocking: Path, tmp_path: Path
) -> None:
    run_dir, gate = tmp_path / "run", tmp_path / "gate"
    config = corpus.config(run_dir, checkpoint=EVERY_THREE)
    ranks = start_run(zygote, config, "gated", of_rank=_gated(gate, THIRD))
    _wait_for_step(run_dir, 5)
    checkpoints = run_dir / "checkpoints"
    assert [p.name for p in checkpoints.glob("step_*")] == [f"{THIRD}.partial"]
    gate.touch()
    output = ranks.succeed()
    assert f"{THIRD}: training waited " in output
    assert [line["loss"] for line in read_log(run_dir)] == [
        line["loss"] for line in read_log(blocking)
    ]
    for tag in (THIRD, SIXTH):
        ours, theirs = checkpoints / tag, blocking / "checkpoints" / tag
        names = sorted(p.name for p in theirs.glob("*.pt"))
        assert names == sorted(p.name for p in ours.glob("*.pt")) and len(names) == 3
        for name in names:
            _assert_same(
                torch.load(ours / name, weights_only=False),
                torch.load(theirs / name, weights_only=False),
                name,
            )


def test_killed_run_goes_on(zygote: Zygote, corpus: Corpus, blocking: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = corpus.config(run_dir, checkpoint=EVERY_THREE)
    ranks = start_run(zygote, config, "killed", of_rank=_gated(tmp_path / "never", SIXTH))
    _wait_for_step(run_dir, 7)
    ranks.signal(signal.SIGKILL)
    ranks.wait()
    checkpoints = run_dir / "checkpoints"
    assert (checkpoints / f"{SIXTH}.partial").is_dir()
    assert (checkpoints / "latest").read_text() == THIRD
    assert json.loads((run_dir / "end.json").read_text())["reason"] == "running"
    output = start_run(zygote, config, "resumed").succeed()
    assert f"continuing at step 3 from {THIRD}" in output
    losses = [line["loss"] for line in read_log(blocking)]
    assert [line["loss"] for line in read_log(run_dir)] == pytest.approx(losses, rel=1e-9)
    assert not list(checkpoints.glob("*.partial"))


def test_nan_loss_keeps_the_begun_checkpoint(
    zygote: Zygote, corpus: Corpus, tmp_path: Path
) -> None:
    run_dir, gate = tmp_path / "run", tmp_path / "gate"
    config = corpus.config(run_dir, checkpoint=EVERY_THREE)
    faults = {"writes_wait_for": [str(gate), THIRD], "nan_weight_after": [3]}
    ranks = start_run(zygote, config, "nan", ranks=1, of_rank={0: {"faults": faults}})
    log = run_dir / "log.jsonl"
    wait_for(lambda: log.exists() and '"loss": null' in log.read_text(), "the loss")
    gate.touch()
    assert ranks.wait() == [1]
    assert "is not a number" in ranks.output()
    assert (run_dir / "checkpoints" / "latest").read_text() == THIRD
    end = json.loads((run_dir / "end.json").read_text())
    assert end["reason"] == "error" and end["saved"] == 3
