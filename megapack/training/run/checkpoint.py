"""Checkpoints: complete or absent, checked before they are loaded, for any number of ranks.

``<directory>/step_00001000/`` holds DeepSpeed's files and ``manifest.json`` (step, world size,
state of the data order, size and checksum of every file). It is written under another name and
renamed when the manifest is complete; ``latest`` names the newest. With another number of ranks
or another ZeRO stage the checkpoint is first rewritten as a DeepSpeed universal checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import xxhash

from megapack.errors import ResumeError
from megapack.storage.atomic import atomic_write
from megapack.training.run.world import World

__all__ = ["CheckpointManifest", "CheckpointStore", "Resume"]

_MANIFEST = "manifest.json"
_VERSION = 1
_BLOCK = 1 << 22

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
    version: int = _VERSION


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A checkpoint that was found good, and how it must be loaded."""

    tag: str
    manifest: CheckpointManifest
    universal: bool
    """Another world size or ZeRO stage: load the universal form."""
    rejected: list[str] = field(default_factory=list)
    """Newer checkpoints that were damaged, and how."""


class CheckpointStore:
    """The checkpoints of one run. All methods but ``tags`` and ``read`` are collective.

    Args:
        directory: shared by all nodes.
        world: this process.
        keep: newest checkpoints to keep.
        zero_stage: of the engine that saves and loads.
    """

    def __init__(self, directory: Path, world: World, *, keep: int, zero_stage: int) -> None:
        self.directory, self.world, self.keep = directory, world, keep
        self.zero_stage = zero_stage

    def tags(self) -> list[str]:
        """Names of the checkpoints, oldest first, damaged ones included."""
        found = self.directory.glob("step_*")
        return sorted(p.name for p in found if p.is_dir() and "." not in p.name)

    def read(self, tag: str) -> CheckpointManifest:
        """The manifest of one checkpoint. Raises ResumeError when it cannot be read."""
        path = self.directory / tag / _MANIFEST
        try:
            return CheckpointManifest(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ResumeError(f"{path} cannot be read: {error}") from error

    # --- saving ---------------------------------------------------------------------------------

    def save(self, engine: Any, step: int, state: dict[str, Any]) -> str:
        """Write the checkpoint of ``step`` and remove those beyond ``keep``.

        Returns:
            Its name. Saving a step again replaces it.

        Raises:
            ResumeError: some rank could not write; nothing appears under the final name.
        """
        tag = f"step_{step:08d}"
        partial = f"{tag}.partial"
        self.world.on_first(self._clear_partial)
        problem = None
        try:
            # No `latest` from DeepSpeed: it would name a directory before it is complete.
            engine.save_checkpoint(
                str(self.directory), partial, client_state={"megapack": state}, save_latest=False
            )
        except (OSError, RuntimeError) as error:
            problem = f"rank {self.world.rank} on {self.world.host}: {error}"
        self.world.fail_together(problem, f"checkpoint {tag} could not be written")
        files = self._measure(self.directory / partial)
        manifest = CheckpointManifest(
            step=step,
            world_size=self.world.size,
            zero_stage=self.zero_stage,
            state=state,
            files=files,
        )
        self.world.on_first(lambda: self._publish(partial, tag, manifest))
        return tag

    def _clear_partial(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for kind in ("partial", "universal"):
            for leftover in self.directory.glob(f"step_*.{kind}"):
                shutil.rmtree(leftover, ignore_errors=True)

    def _publish(self, partial: str, tag: str, manifest: CheckpointManifest) -> None:
        with atomic_write(self.directory / partial / _MANIFEST, "w") as file:
            json.dump(manifest.__dict__, file, indent=1)
        target = self.directory / tag
        if target.exists():
            shutil.rmtree(target)
        (self.directory / partial).rename(target)
        with atomic_write(self.directory / "latest", "w") as file:
            file.write(tag)
        for old in self.tags()[: -self.keep]:
            shutil.rmtree(self.directory / old)

    def _measure(self, directory: Path) -> dict[str, dict[str, Any]]:
        """Sizes and checksums of all files; every rank reads its share of them."""
        mine = {
            name: {"bytes": (directory / name).stat().st_size, "xxh3": _xxh3(directory / name)}
            for name in self._share(_file_names(directory))
        }
        parts: list[dict[str, dict[str, Any]]] = [{}] * self.world.size
        dist.all_gather_object(parts, mine)
        return dict(sorted((name, value) for part in parts for name, value in part.items()))

    # --- finding and loading --------------------------------------------------------------------

    def find(self, *, verify: Verify, fallback: bool) -> Resume | None:
        """The newest good checkpoint; None when the run has none.

        Args:
            verify: compare sizes, or read every file and compare checksums.
            fallback: skip damaged checkpoints instead of refusing to start.

        Raises:
            ResumeError: the newest is damaged and ``fallback`` is off, or all are; or it is of a
                ZeRO stage that cannot be carried over.
        """
        rejected: dict[str, str] = {}
        tags: list[list[str]] = [self.tags()]
        dist.broadcast_object_list(tags, src=0)  # one view, should a shared disk lag
        for tag in reversed(tags[0]):
            problems = self._problems(tag, verify)
            if not problems:
                manifest = self.read(tag)
                universal = self._needs_universal(manifest)
                self.world.on_first(lambda: self._set_aside(list(rejected)))
                found = list(rejected.values())
                return Resume(tag=tag, manifest=manifest, universal=universal, rejected=found)
            rejected[tag] = f"{self.directory / tag} is damaged: {'; '.join(problems)}"
            if not fallback:
                raise ResumeError(
                    f"{rejected[tag]}. Restore it, or set checkpoint.fallback=true to continue "
                    "from the one before"
                )
        if rejected:
            raise ResumeError(f"no checkpoint can be loaded: {'. '.join(rejected.values())}")
        return None

    def _set_aside(self, tags: list[str]) -> None:
        """Damaged checkpoints keep their files under a name that nobody loads or prunes."""
        for tag in tags:
            target = self.directory / f"{tag}.damaged"
            shutil.rmtree(target, ignore_errors=True)
            (self.directory / tag).rename(target)

    def _needs_universal(self, manifest: CheckpointManifest) -> bool:
        """Whether a checkpoint must be rewritten for this number of ranks and ZeRO stage."""
        before, now = manifest.zero_stage, self.zero_stage
        if before != now and not {before, now} <= {1, 2}:
            raise ResumeError(
                f"the checkpoint was written with ZeRO-{before} and this run has ZeRO-{now}: "
                f"DeepSpeed cannot carry optimizer state from one to the other. Set "
                f"engine.zero_stage={before}, or begin anew from the exported model"
            )
        if now == 0:  # every rank holds everything: any number of ranks can load it
            return False
        return (manifest.world_size, before) != (self.world.size, now)

    def load(self, engine: Any, resume: Resume) -> None:
        """Bring the engine to the state of a checkpoint that ``find`` returned.

        Raises:
            ResumeError: DeepSpeed refuses it (another model, optimizer or precision).
        """
        tag = resume.tag
        problem = None
        if resume.universal:
            tag = f"{resume.tag}.universal"
            self.world.on_first(lambda: self._convert(resume.tag, tag))
        try:
            path, _ = engine.load_checkpoint(str(self.directory), tag=tag)
            problem = None if path else "DeepSpeed found nothing to load"
        except (OSError, RuntimeError, ValueError, KeyError, AssertionError) as error:
            problem = f"{type(error).__name__}: {error}"
        where = f"checkpoint {self.directory / tag}"
        self.world.fail_together(problem, f"{where} does not fit this run")
        if resume.universal:
            self.world.on_first(lambda: self._forget_universal(tag))

    def _convert(self, tag: str, universal: str) -> None:
        shutil.rmtree(self.directory / universal, ignore_errors=True)
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--input_folder", str(self.directory / tag)]
        command += ["--output_folder", str(self.directory / universal), "--inject_missing_state"]
        # Its own process group variables would make the converter join this run.
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ResumeError(
                f"checkpoint {tag} cannot be rewritten for another number of ranks or ZeRO "
                f"stage: {last}"
            )

    def _forget_universal(self, universal: str) -> None:
        shutil.rmtree(self.directory / universal, ignore_errors=True)
        (self.directory / "latest_universal").unlink(missing_ok=True)

    def _problems(self, tag: str, verify: Verify) -> list[str]:
        """What is wrong with a checkpoint, the same list on every rank."""
        mine: list[str] = []
        try:
            manifest = self.read(tag)
        except ResumeError as error:
            mine = [str(error)]
        else:
            for name in self._share(list(manifest.files)):
                problem = _compare(self.directory / tag / name, manifest.files[name], verify)
                if problem:
                    mine.append(f"{name} {problem}")
        parts: list[list[str]] = [[]] * self.world.size
        dist.all_gather_object(parts, mine)
        return sorted({problem for part in parts for problem in part})

    # --- together -------------------------------------------------------------------------------

    def _share(self, names: list[str]) -> list[str]:
        return sorted(names)[self.world.rank :: self.world.size]


def _file_names(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def _compare(path: Path, expected: dict[str, Any], verify: Verify) -> str | None:
    try:
        size = path.stat().st_size
    except OSError:
        return "is missing"
    if size != expected["bytes"]:
        return f"has {size} bytes instead of {expected['bytes']}"
    if verify == "checksum" and _xxh3(path) != expected["xxh3"]:
        return "has another checksum than when it was written"
    return None


def _xxh3(path: Path) -> str:
    state = xxhash.xxh3_128()
    for block in _blocks(path):
        state.update(block)
    return state.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block
