"""Ranks are found whatever started them, and a missing variable is named."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megapack.errors import ConfigError
from megapack.training.command import join

from .processes import ROOT

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *SLURM):
        # Set first, so that what join() writes is undone as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _found() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in NAMES}


def test_a_plain_process_is_a_run_of_one() -> None:
    join()
    found = _found()
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("0", "1", "0")
    assert found["MASTER_ADDR"] == "127.0.0.1" and int(found["MASTER_PORT"] or 0) > 0


def test_deepspeed_launcher_gives_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    join(local_rank=1)
    assert _found() == {**values, "LOCAL_RANK": "1"}


def test_slurm_tasks_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="did not set MASTER_ADDR, MASTER_PORT; start with"):
        join()
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    join()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == (
        "9",
        "16",
        "1",
    )


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="did not set WORLD_SIZE, LOCAL_RANK, MASTER_ADDR"):
        join()


@pytest.mark.parametrize(
    ("code", "lost", "again"),
    [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 0),
        (75, 99, 1),
        (138, 9, 1),
        (138, 10, 0),
        (76, 0, 1),
        (137, 9, 1),
        (137, 10, 0),
    ],
)
def test_slurm_script_queues_again(code: int, lost: int, again: int, tmp_path: Path) -> None:
    """srun and scontrol only write down how they were called; test_slurm.py has the real ones."""
    for tool, text in {
        "srun": f'echo "srun $MASTER_ADDR $*" >> {tmp_path}/calls; exit {code}',
        "scontrol": f'echo "scontrol $*" >> {tmp_path}/calls; echo first-node; echo second-node',
    }.items():
        path = tmp_path / tool
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "CONFIG": "x.yaml",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }
    script = ROOT / "launch" / "slurm.sh"
    command = ["bash", str(script), "--set", "seed=3"]
    times = tmp_path / "megapack-7.lost"
    times.write_text("before\n" * lost)
    done = subprocess.run(
        command, check=False, env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    calls = (tmp_path / "calls").read_text()
    # A rank that ends must not make Slurm kill the others, whose code would become 143.
    srun = "srun first-node --kill-on-bad-exit=0 --wait=600 .venv/bin/python"
    assert f"{srun} -m megapack.training.pretrain" in calls
    assert "--config x.yaml --set seed=3" in calls
    assert calls.count("requeue 7") == again
    assert len(times.read_text().splitlines()) == lost + (code in (76, 137, 138))
