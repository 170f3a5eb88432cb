"""launch/slurm.sh on a real Slurm: preemption, time limit, a lost rank, repeated loss, a simulated
container."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megapack.training.engine.directory import read_jsonl

from .conftest import Corpus, NewRun
from .processes import wait_for
from .slurm import Slurm, missing, one_node

SECTIONS: dict[str, Any] = {
    "num_steps": 60,
    "learning_rate": {"kind": "constant", "warmup_steps": 2},
    "checkpoint": {"every": 5, "keep": 2, "export": False},
    "engine": {"heartbeat_timeout_seconds": 10},
}
SIZE = ("--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(bool(missing()), reason=f"no Slurm here: {missing()}"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with one_node(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(module_run: NewRun) -> list[dict[str, Any]]:
    """Return log lines of the same run without Slurm and faults."""
    run = module_run(**SECTIONS)
    run.succeed()
    return run.log


class Job:
    """A run submitted with launch/slurm.sh."""

    def __init__(
        self,
        slurm: Slurm,
        corpus: Corpus,
        folder: Path,
        *options: str,
        sections: dict[str, Any] | None = None,
        **env: str,
    ) -> None:
        self.slurm, self.folder, self.run_dir = slurm, folder, folder / "run"
        config = corpus.config(self.run_dir, **{**SECTIONS, **(sections or {})})
        venv = str(Path(sys.executable).parent.parent)
        self.env = {"CONFIG": str(config), "VENV": venv, **env}
        self.id = slurm.submit(*SIZE, *options, cwd=folder, **self.env)

    def wait_for_checkpoint(self, after: int = 0) -> int:
        """Return the step of the first checkpoint after a step."""
        found: list[int] = []

        def is_there() -> bool:
            paths = self.run_dir.glob("checkpoints/step_*")
            found[:] = [int(path.name.split("_")[1]) for path in paths]
            return max(found, default=0) > after

        wait_for(is_there, f"a checkpoint after step {after}")
        return max(found)

    def kill_a_rank(self) -> None:
        """Kill rank 1, as an out-of-memory killer does."""
        # Job step 0 reads run_dir.
        lines = self.slurm.call("scontrol", "listpids", f"{self.id}.1").splitlines()[1:]
        [pid] = {int(line.split()[0]) for line in lines if line.split()[4] == "1"}
        os.kill(pid, signal.SIGKILL)

    def output(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("megapack-*.log"))

    def starts(self) -> list[dict[str, Any]]:
        path = self.run_dir / "starts.jsonl"
        return list(read_jsonl(path)) if path.exists() else []

    def check_result(self, undisturbed: list[dict[str, Any]]) -> None:
        lines = list(read_jsonl(self.run_dir / "log.jsonl"))
        assert [line["samples"] for line in lines] == [line["samples"] for line in undisturbed]
        losses = [line["loss"] for line in undisturbed]
        assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)


# Slurm's warning before the time limit; SIGTERM, then SIGKILL: another job takes its place.
@pytest.mark.parametrize("stop", ["scancel --signal=USR1", "scontrol requeue"])
def test_preempted_job_is_queued_again_and_finishes(
    stop: str, slurm: Slurm, corpus: Corpus, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    job = Job(slurm, corpus, tmp_path)
    saved = job.wait_for_checkpoint()
    slurm.call(*stop.split(), job.id)
    facts = slurm.wait_until_over(job.id)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.output()[-4000:]
    first, second = job.starts()
    assert first["step"] == 0 and second["step"] >= saved
    job.check_result(undisturbed)


def test_job_that_lost_a_rank_is_queued_again_a_few_times(
    slurm: Slurm, corpus: Corpus, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    job = Job(slurm, corpus, tmp_path, MAX_RESTARTS="1")
    saved = 0
    for _ in range(2):
        saved = job.wait_for_checkpoint(saved)
        job.kill_a_rank()
    facts = slurm.wait_until_over(job.id)
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "1"), job.output()[-4000:]
    assert len((tmp_path / f"megapack-{job.id}.lost").read_text().splitlines()) == 2
    assert "lost contact with rank 1" in job.output()
    again = slurm.submit(*SIZE, cwd=tmp_path, **job.env)
    assert slurm.wait_until_over(again)["JobState"] == "COMPLETED", job.output()[-4000:]
    job.check_result(undisturbed)


def test_job_without_checkpoints_is_queued_again_a_few_times(
    slurm: Slurm, corpus: Corpus, tmp_path: Path
) -> None:
    """The rank is lost before the first checkpoint, every time."""
    never = {"checkpoint": {"every": None, "export": False}, "num_steps": 10**6}
    job = Job(slurm, corpus, tmp_path, sections=never, MAX_STALLED="2")
    for start in (1, 2):
        wait_for(lambda start=start: len(job.starts()) == start, f"start {start}")
        job.kill_a_rank()
    facts = slurm.wait_until_over(job.id)
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "1"), job.output()[-4000:]
    assert "2 starts in a row without a checkpoint" in job.output()


def test_container_options_reach_slurm(slurm: Slurm, corpus: Corpus, tmp_path: Path) -> None:
    """Every step of the job has them, and a Slurm without such a plugin refuses them."""
    image = "registry.example#a/b:1"
    few = {"num_steps": 3}
    job = Job(slurm, corpus, tmp_path, sections=few, CONTAINER_IMAGE=image, PYTHON=sys.executable)
    assert slurm.wait_until_over(job.id)["JobState"] == "COMPLETED", job.output()[-4000:]
    line = f"{image} {tmp_path} {tmp_path}:{tmp_path}"
    # One task reads run_dir, two train.
    assert (tmp_path / "containers").read_text().splitlines() == [line] * 3
    slurm.use_containers(False)
    try:
        again = slurm.submit(*SIZE, cwd=tmp_path, **job.env)
        facts = slurm.wait_until_over(again)
    finally:
        slurm.use_containers(True)
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "0"), job.output()[-4000:]
    assert "unrecognized option '--container-image" in job.output()


def test_time_limit_saves_a_checkpoint(slurm: Slurm, corpus: Corpus, tmp_path: Path) -> None:
    # The warning may come a minute early: two minutes to start, one to save.
    limit = ("--time=00:04:00", "--signal=USR1@60")
    job = Job(slurm, corpus, tmp_path, *limit, sections={"num_steps": 10**6})
    wait_for(lambda: len(job.starts()) > 1, "the second start")
    slurm.call("scancel", job.id)
    slurm.wait_until_over(job.id)
    first, second = job.starts()[:2]
    assert first["step"] == 0 < second["step"]
    assert "DUE TO TIME LIMIT" not in job.output()
    assert f"continuing at step {second['step']}" in job.output()
