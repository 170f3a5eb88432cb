"""The files of a checkpoint: summed up while they are written, on the disk before they count.

DeepSpeed writes with ``torch.save(path)``, whose C++ writer reports a full disk as "unexpected
pos", and without fsync; and a rank that raised there would leave the others in a barrier.

Its own asynchronous engines give neither checksums nor fsync, and its writer process ends in
silence; torch's (DCP) writes files that DeepSpeed cannot convert for other ranks. So the copy to
the host is torch's, the files stay DeepSpeed's, and a thread writes them.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from megapack.storage.atomic import AtomicFile, Buffer, publish
from megapack.training.run.world import RankProgress

__all__ = ["WrittenFiles", "host_copies", "saving_to"]


class WrittenFiles:
    """What this rank wrote, so that nobody has to list a directory that others write to.

    Args:
        directory: of the checkpoint.
        progress: of this rank, which goes on while it waits for files.
        stager: of ``host_copies``; None: ``save`` writes at once.

    Attributes:
        files: relative name -> ``bytes`` and ``xxh3``.
        problem: the first failure; nothing is written after it.
    """

    def __init__(
        self, directory: Path, progress: RankProgress, stager: DefaultStager | None = None
    ) -> None:
        self.directory, self.progress = directory, progress
        self.files: dict[str, dict[str, Any]] = {}
        self.problem: str | None = None
        self._stager = stager
        self._copies: list[tuple[Any, str]] = []
        self._thread = threading.Thread(target=self._write_copies, daemon=True, name="checkpoint")
        # What a thread does is no progress of the run, until somebody waits for it.
        self._steps = progress if stager is None else RankProgress()

    def save(self, state_dict: Any, path: str) -> None:
        """In place of the method of DeepSpeed's checkpoint engine."""
        if self._stager is None:
            self._write(state_dict, path)
        else:
            self._copies.append((self._stager.stage(state_dict), path))

    def start(self) -> None:
        """Write what was copied, from now on, while others go on."""
        self._thread.start()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be written, or can be."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is."""
        seen = self._steps.count
        while self._thread.is_alive():
            self._thread.join(timeout=1.0)
            if self._steps.count > seen:
                seen = self._steps.count
                self.progress.at(self._steps.place)

    def _write_copies(self) -> None:
        while self._copies:
            self._write(*self._copies.pop(0))

    def _write(self, state_dict: Any, path: str) -> None:
        if self.problem is not None:
            return
        file = None
        try:
            file = _SummedFile(path, self._steps)
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
def saving_to(engine: Any, files: WrittenFiles) -> Iterator[None]:
    """While this lasts, files of a DeepSpeed engine's checkpoint are saved here."""
    theirs = engine.checkpoint_engine
    original = theirs.save
    theirs.save = files.save
    try:
        yield
    finally:
        theirs.save = original


def host_copies() -> DefaultStager:
    """What copies state to the host; its memory there is kept and used again."""
    cuda = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=cuda,
        )
    )
