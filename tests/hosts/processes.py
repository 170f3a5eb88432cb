"""Processes that run a host's checkout, which is read and never written to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

ROOT = Path(__file__).parents[2]
REFUSED = "(Config|Leak)Error: "  # LeakError: of the probe
# Messages of all hosts; tests/integrations/test_rank_rows.py compares them without a host.
LEAK = "see another document"
CHANGED = "of the first micro batch differs from what megapack gave"
LAUNCHERS = ROOT / "tests" / "hosts"


def trees_of(variable: str) -> list[Path]:
    """Checkouts named by an environment variable: ``/path[:/another]``."""
    return [Path(path) for path in os.environ.get(variable, "").split(os.pathsep) if path]


def marks_of(trees: list[Path], variable: str, host: str) -> list[Any]:
    """Return marks of a module whose tests start processes of the host's checkout."""
    reason = f"{variable} names no checkout of {host}"
    return [pytest.mark.multiprocess, pytest.mark.skipif(not trees, reason=reason)]


def environment_of(tree: Path, packages: str) -> dict[str, str]:
    """Return the environment of a process that imports this checkout.

    Args:
        tree: the checkout.
        packages: folder of the virtual environment with the packages that only this host needs
            (Makefile); it precedes the folders of PYTHONPATH.
    """
    paths = (tree, ROOT, Path(sys.prefix) / packages, *trees_of("PYTHONPATH"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


def torchrun(ranks: int, launcher: str) -> list[str]:
    """Return the command that starts this many ranks of a launcher in this folder."""
    program = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    port = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return [*program, *port, str(LAUNCHERS / launcher)]


def run(
    command: list[str], folder: Path | None, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run the command in the folder to its end, whether it fails or not."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": PATIENCE}
    return subprocess.run(command, check=False, cwd=folder, env=environment, **how)


def finish(command: list[str], folder: Path, environment: dict[str, str], subject: str) -> str:
    """Run the command in the folder; return its log. Raises AssertionError if it fails."""
    done = run(command, folder, environment)
    assert done.returncode == 0, f"{subject}:\n{(done.stdout + done.stderr)[-6000:]}"
    return done.stdout + done.stderr


def is_refused(command: list[str], folder: Path, environment: dict[str, str], said: str) -> None:
    """Run the command in the folder: it ends in an error of megapack that says so, and no call is
    kept."""
    done = run(command, folder, environment)
    told = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and re.search(REFUSED, told) and said in told, told[-6000:]
    assert not list(folder.glob("rank*.pt"))


# From 0.19 on Megatron-LM asks for Python 3.12, which has typing.override.
OLDER_PYTHON = "import typing, typing_extensions; typing.override = typing_extensions.override\n"


def last_line(
    program: str, environment: dict[str, str], *arguments: str, folder: Path | None = None
) -> str:
    """Return the last output of a program that imports a host; it runs in the folder."""
    command = [sys.executable, "-c", OLDER_PYTHON + program, *arguments]
    done = run(command, folder, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return (done.stdout.splitlines() or [""])[-1]
