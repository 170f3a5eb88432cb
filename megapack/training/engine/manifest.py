"""``manifest.json`` of a checkpoint: its step, its state, and size and checksum of every file.

manifest = CheckpointManifest.read(directory / "step_00000008_tokens_8192")
manifest.files["mp_rank_00_model_states.pt"]  # -> FileFacts(bytes=1840, xxh3="ab12...")
manifest.files[name].problem(path, "size", progress)  # -> "is missing"
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megapack.config import check_range
from megapack.errors import ResumeError
from megapack.records import check_inside, read_record
from megapack.storage.files import atomic_write
from megapack.storage.metadata import file_checksum

MANIFEST = "manifest.json"
_REMEDY = (
    "restore it from a copy, or set checkpoint.fallback=true to continue from the checkpoint before"
)

Verify = Literal["size", "checksum"]


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Size and checksum (xxh3_128, hexadecimal) of a file."""

    bytes: int
    xxh3: str

    def problem(self, path: Path, verify: Verify, progress: Callable[[], object]) -> str | None:
        """Return how the file at ``path`` differs, as half a sentence; None: it does not.

        Args:
            path: of the file.
            verify: ``size`` does not notice other bytes of the same length, such as two files that
                were swapped; ``checksum`` reads the file.
            progress: called for every part that is read.
        """
        try:
            size = path.stat().st_size
        except OSError:
            return "is missing"
        if size != self.bytes:
            return f"has {size} bytes instead of {self.bytes}"
        if verify == "checksum" and file_checksum(path, progress) != self.xxh3:
            return "has another checksum than when it was written"
        return None


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Facts about a checkpoint, readable without loading it."""

    step: int
    """Optimizer steps that were done."""
    world_size: int
    zero_stage: int
    state: dict[str, Any]
    """State of the trainer: order of samples, record of the run, decisions."""
    files: dict[str, FileFacts]
    """Path relative to the checkpoint -> facts."""
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        check_range("manifest", at_least=0, step=self.step, zero_stage=self.zero_stage)
        check_range("manifest", at_least=1, world_size=self.world_size)
        for name in self.files:
            check_inside("a name in files", name)

    @staticmethod
    def read(directory: Path, path: Path | None = None) -> CheckpointManifest:
        """Read the manifest of one checkpoint.

        Args:
            directory: of the checkpoint; its name states its step.
            path: of the manifest, if it lies elsewhere.

        Raises:
            ResumeError: the manifest cannot be read, is damaged, or is of another step.
        """
        path = path or directory / MANIFEST
        try:
            manifest = read_record(CheckpointManifest, path, remedy=_REMEDY, error=ResumeError)
        except OSError as error:
            raise ResumeError(f"{path} cannot be read: {error}") from error
        if not directory.name.startswith(f"step_{manifest.step:08d}_"):
            raise ResumeError(
                f"{path}: step is {manifest.step}, and the checkpoint is named {directory.name}; "
                "give the directory its former name"
            )
        return manifest

    def write(self, directory: Path) -> None:
        """Write the manifest, the last file of a checkpoint."""
        with atomic_write(directory / MANIFEST, "w") as file:
            json.dump(asdict(self), file, indent=1)
