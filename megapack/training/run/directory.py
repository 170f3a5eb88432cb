"""The directory of a run: everything needed to say later what was run, on what, with what.

``config.yaml`` the resolved configuration, ``starts.jsonl`` one line per start (versions, git,
hosts, fingerprints, command), ``log.jsonl`` one line per step, ``evaluation.jsonl``,
``checkpoints/``, ``tensorboard/``, ``model/`` (what ``from_pretrained`` loads), ``end.json``, and
when asked for ``batches/``, what every rank was fed.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

import megapack
from megapack.config import to_dict
from megapack.errors import FormatError
from megapack.storage.atomic import atomic_write

__all__ = ["RunDirectory", "environment", "git_state", "plain", "read_jsonl"]

_PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "flash-attn", "triton")


class RunDirectory:
    """Paths of a run, and the files one process writes once."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.log = self.path / "log.jsonl"
        self.evaluation = self.path / "evaluation.jsonl"
        self.batches = self.path / "batches"
        self.tensorboard = self.path / "tensorboard"

    def begin(self, config: Any, facts: dict[str, Any]) -> None:
        """Record a start: the configuration in full, and one line of facts."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "end.json").unlink(missing_ok=True)
        with atomic_write(self.path / "config.yaml", "w") as file:
            yaml.safe_dump(plain(to_dict(config)), file, sort_keys=False)
        line = {"time": time.time(), **environment(), **facts}
        with (self.path / "starts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def end(self, facts: dict[str, Any]) -> None:
        """Record why and where the run ended."""
        with atomic_write(self.path / "end.json", "w") as file:
            json.dump({"time": time.time(), **facts}, file, indent=1)

    def forget_after(self, step: int) -> None:
        """Drop what a run that continues at ``step`` writes again.

        A line of a step is about that step; a line of an evaluation, about the steps before it.
        """
        kept = {self.evaluation: step + 1}
        for path in (self.log, self.evaluation, *self.batches.glob("*.jsonl")):
            if path.exists():
                end = kept.get(path, step)
                lines = [line for line in read_jsonl(path) if line["step"] < end]
                with atomic_write(path, "w") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a log. A last line cut short by a kill is left out.

    Raises:
        FormatError: another line is not JSON.
        OSError: the file cannot be read.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise FormatError(f"{path}, line {number} is not JSON: {error}") from error


def environment() -> dict[str, Any]:
    """Versions, devices, host and the state of the working tree."""
    versions = {"python": platform.python_version(), "megapack": megapack.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        versions["cuda"] = str(torch.version.cuda)
    return {
        "versions": versions,
        "device": device,
        "host": platform.node(),
        "command": sys.argv,
        "git": git_state(Path.cwd()),
    }


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit and whether the tree differs from it; None outside of a repository."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(directory, "status", "--porcelain"))}


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=directory, check=True, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def plain(value: Any) -> Any:
    """Tuples as lists, as YAML and JSON have them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
