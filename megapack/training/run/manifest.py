"""What stands in a checkpoint's directory, its name, and whether the files are those written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megapack.errors import ResumeError
from megapack.storage.atomic import atomic_write
from megapack.storage.meta import checksum

__all__ = ["CheckpointManifest", "Verify", "compare_file", "step_of", "tag_of", "tags_in"]

_MANIFEST = "manifest.json"

Verify = Literal["size", "checksum"]


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """What a checkpoint is, readable without loading it."""

    step: int
    """Optimizer steps that were done."""
    world_size: int
    zero_stage: int
    state: dict[str, Any]
    """The caller's: the order of samples, the length of the run."""
    files: dict[str, dict[str, Any]]
    """Relative name -> ``bytes`` and ``xxh3``."""
    version: int = 1

    @staticmethod
    def read(directory: Path) -> CheckpointManifest:
        """Of one checkpoint. Raises ResumeError when it cannot be read."""
        path = directory / _MANIFEST
        try:
            return CheckpointManifest(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ResumeError(f"{path} cannot be read: {error}") from error

    def write(self, directory: Path) -> None:
        """The last file of a checkpoint."""
        with atomic_write(directory / _MANIFEST, "w") as file:
            json.dump(self.__dict__, file, indent=1)


def tag_of(step: int, tokens: int) -> str:
    """The name of the checkpoint after ``step`` steps and ``tokens`` tokens, padding included."""
    return f"step_{step:08d}_tokens_{tokens}"


def tags_in(directory: Path) -> list[str]:
    """Names of the checkpoints by tokens seen, damaged ones included.

    Not by steps: they count anew when a run goes on with other ``tokens_per_step``.
    """
    found = (path.name for path in directory.glob("step_*") if path.is_dir())
    return sorted((name for name in found if "." not in name), key=_tokens)


def step_of(tag: str) -> int:
    """Optimizer steps of a checkpoint's name."""
    return int(tag.split("_")[1])


def _tokens(tag: str) -> int:
    number = tag.rpartition("_")[2]
    return int(number) if number.isdigit() else -1


def compare_file(path: Path, expected: dict[str, Any], verify: Verify) -> str | None:
    """What is wrong with a file of a manifest; None when nothing is."""
    try:
        size = path.stat().st_size
    except OSError:
        return "is missing"
    if size != expected["bytes"]:
        return f"has {size} bytes instead of {expected['bytes']}"
    if verify == "checksum" and checksum(path) != expected["xxh3"]:
        return "has another checksum than when it was written"
    return None
