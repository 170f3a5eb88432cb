"""Processes that run a host's checkout, which is read and never written to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

ROOT = Path(__file__).parents[2]
LAUNCHERS = ROOT / "tests" / "hosts"


def trees_of(variable: str) -> list[Path]:
    """Checkouts named by an environment variable: ``/path[:/another]``."""
    return [Path(path) for path in os.environ.get(variable, "").split(os.pathsep) if path]


def environment_of(tree: Path, packages: str) -> dict[str, str]:
    """Of a process that imports this checkout.

    Args:
        tree: the checkout.
        packages: folder of the virtual environment with what this host alone needs (Makefile);
            what PYTHONPATH names is found behind it.
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


def finish(command: list[str], folder: Path, environment: dict[str, str], subject: str) -> str:
    """Run the command in the folder; what it logged. Raises AssertionError where it fails."""
    done = subprocess.run(
        command,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, f"{subject}:\n{done.stdout[-6000:]}"
    return done.stdout
