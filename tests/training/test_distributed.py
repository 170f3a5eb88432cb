"""Ranks are read from any launcher's environment; a missing variable is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megapack.errors import ConfigError
from megapack.training.command import set_rank_environment

from .conftest import Corpus
from .processes import ROOT, environment

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *SLURM):
        # Set first, so that monkeypatch also undoes changes by set_rank_environment().
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _set(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def _found() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in NAMES}


def test_plain_process_is_one_rank() -> None:
    set_rank_environment()
    found = _found()
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("0", "1", "0")
    assert found["MASTER_ADDR"] == "127.0.0.1" and int(found["MASTER_PORT"] or 0) > 0


def test_deepspeed_launcher_gives_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "5", "WORLD_SIZE": "8", **MASTER}
    _set(monkeypatch, **values)
    set_rank_environment(local_rank=1)
    assert _found() == {**values, "LOCAL_RANK": "1"}


def test_slurm_tasks_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SLURM_PROCID="9", SLURM_NTASKS="16", SLURM_LOCALID="1")
    with pytest.raises(ConfigError, match="did not set MASTER_ADDR, MASTER_PORT; start with"):
        set_rank_environment()
    _set(monkeypatch, **MASTER)
    set_rank_environment()
    assert list(_found().values())[:3] == ["9", "16", "1"]


def test_incomplete_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="did not set WORLD_SIZE, LOCAL_RANK, MASTER_ADDR"):
        set_rank_environment()


class SlurmScript:
    """Run launch/slurm.sh with srun, sbatch and scontrol that only log their arguments
    (test_slurm.py uses the real ones)."""

    def __init__(self, folder: Path, code: int = 0, *, checkpoint: str | None = None) -> None:
        self.folder, newest = folder, folder / "run" / "checkpoints" / "latest"
        newest.parent.mkdir(parents=True, exist_ok=True)
        newest.write_text("step_00000003_tokens_9")
        saved = f"echo {checkpoint} > {newest};" if checkpoint else ""
        calls = f"{folder}/calls"
        for tool, text in {
            "srun": f'echo "srun $MASTER_ADDR $*" >> {calls}; case $* in *training.command*) '
            f"echo {folder}/run;; *) {saved} exit {code};; esac",
            "scontrol": f'echo "scontrol $*" >> {calls}; echo first-node; echo second-node',
            "sbatch": f'echo "sbatch $*" >> {calls}',
        }.items():
            (folder / tool).write_text(f"#!/bin/bash\n{text}\n")
            (folder / tool).chmod(0o755)

    def run(self, **more: str) -> tuple[int, str]:
        """Return the exit code and the calls."""
        job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "77", "SLURM_JOB_NODELIST": "n[1-2]"}
        env = {"PATH": f"{self.folder}:/usr/bin:/bin", "CONFIG": "x.yaml", **job, **more}
        command = ["bash", str(ROOT / "launch" / "slurm.sh"), "--set", "seed=3"]
        done = subprocess.run(command, check=False, env=env, cwd=self.folder, capture_output=True)
        return done.returncode, (self.folder / "calls").read_text()

    def lines(self, name: str) -> int:
        path = self.folder / f"megapack-7.{name}"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("code", "lost", "again"),
    [(0, 0, 0), (1, 0, 0), (2, 0, 0), (75, 99, 1), (138, 9, 1), (138, 10, 0), (76, 0, 1)]
    + [(137, 9, 1), (137, 10, 0)],
)
def test_slurm_script_queues_again(code: int, lost: int, again: int, tmp_path: Path) -> None:
    script = SlurmScript(tmp_path, code, checkpoint="step_00000006_tokens_18")
    (tmp_path / "megapack-7.lost").write_text("before\n" * lost)
    found, calls = script.run()
    assert found == code
    # If a rank ends, Slurm must not kill the others, whose code would become 143.
    srun = "srun first-node --kill-on-bad-exit=0 --wait=600 .venv/bin/python"
    assert f"{srun} -m megapack.training.pretrain --config x.yaml --set seed=3" in calls
    assert calls.count("requeue 7") == again
    assert script.lines("lost") == lost + (code in (76, 137, 138))
    assert script.lines("stalled") == 0


def test_starts_without_a_newer_checkpoint_are_limited(tmp_path: Path) -> None:
    """Also after 75, which has no other limit; a new checkpoint resets the count."""
    script = SlurmScript(tmp_path, 75)
    for start, again in enumerate([1, 2, 2], 1):
        found, calls = script.run()
        assert (found, calls.count("requeue 7"), script.lines("stalled")) == (75, again, start)
    (tmp_path / "megapack-7.stalled").write_text("before\n" * 2)
    found, calls = SlurmScript(tmp_path, 75, checkpoint="step_00000004_tokens_12").run()
    assert (found, calls.count("requeue 7"), script.lines("stalled")) == (75, 3, 0)


def test_slurm_script_has_a_container_and_gpus_per_node_as_settings(tmp_path: Path) -> None:
    script = SlurmScript(tmp_path)
    _, calls = script.run(CONTAINER_IMAGE="reg#a/b:1", CONTAINER_MOUNTS="/data:/data")
    box = f"--container-image=reg#a/b:1 --container-workdir={tmp_path}"
    box += " --container-mounts=/data:/data python3 -m megapack.training"
    assert f"srun first-node --kill-on-bad-exit=0 --wait=600 {box}.pretrain" in calls
    assert f"--ntasks=1 {box}.command" in calls
    sizes = {"NODES": "4", "GPUS_PER_NODE": "2", "TASK_OPTIONS": "--mem=0 -C x"}
    _, calls = script.run(SLURM_JOB_ID="", **sizes)
    asked = "sbatch --nodes=4 --ntasks-per-node=2 --gpus-per-node=2 --mem=0 -C x "
    assert f"{asked}{ROOT}/launch/slurm.sh --set seed=3" in calls


def test_command_prints_the_run_directory(corpus: Corpus, tmp_path: Path) -> None:
    config = corpus.config(tmp_path / "run")
    command = [sys.executable, "-m", "megapack.training.command", "--config", str(config)]
    command += ["--branch-from", "x", "--set", "run_dir=there"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment(), cwd=ROOT
    )
    assert done.stdout == "there\n"
