"""The files of a checkpoint: summed up while they are written, on the disk before they count.

DeepSpeed writes with ``torch.save(path)``, whose C++ writer reports a full disk as "unexpected
pos", and without fsync; and a rank that raised there would leave the others in a barrier.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash

from megapack.storage.atomic import AtomicFile, Buffer, publish
from megapack.training.run.world import RankProgress

__all__ = ["WrittenFiles", "written_files"]


class WrittenFiles:
    """What this rank wrote, so that nobody has to list a directory that others write to.

    Attributes:
        files: relative name -> ``bytes`` and ``xxh3``.
        problem: the first failure; nothing is written after it.
    """

    def __init__(self, directory: Path, progress: RankProgress) -> None:
        self.directory, self.progress = directory, progress
        self.files: dict[str, dict[str, Any]] = {}
        self.problem: str | None = None

    def save(self, state_dict: Any, path: str) -> None:
        """In place of the method of DeepSpeed's checkpoint engine."""
        if self.problem is not None:
            return
        file = None
        try:
            file = _SummedFile(path, self.progress)
            torch.save(state_dict, file)  # type: ignore[arg-type]  # all it uses
            publish(file.file)
        except (OSError, RuntimeError) as error:
            free = shutil.disk_usage(self.directory.parent).free
            self.problem = f"{(file and file.error) or error} ({free / 1e6:,.0f} MB free)"
            return
        name = os.path.relpath(path, self.directory)
        self.files[name] = {"bytes": file.num_bytes, "xxh3": file.sum.hexdigest()}


class _SummedFile:
    """As much of a file as ``torch.save`` asks for."""

    def __init__(self, path: str, progress: RankProgress) -> None:
        self._progress = progress
        self.file = AtomicFile(path)
        self.sum = xxhash.xxh3_128()
        self.num_bytes = 0
        self.error: OSError | None = None
        """Why it could not be written; torch reports what its zip writer makes of that."""

    def write(self, data: Buffer) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sum.update(data)
        self.num_bytes += memoryview(data).nbytes
        self._progress.at(f"writing {self.file.path.name}")
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Nothing is held back."""


@contextmanager
def written_files(engine: Any, directory: Path, progress: RankProgress) -> Iterator[WrittenFiles]:
    """While this lasts, files of a DeepSpeed engine's checkpoint are written here."""
    written, theirs = WrittenFiles(directory, progress), engine.checkpoint_engine
    original = theirs.save
    theirs.save = written.save
    try:
        yield written
    finally:
        theirs.save = original
