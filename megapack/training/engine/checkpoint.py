"""Checkpoints: written completely or not at all, checked before loading, for any number of ranks.

``<directory>/step_00001000_tokens_4194304000/`` contains DeepSpeed's files and ``manifest.json``
(step, world size, state of the data order, size and checksum of every file). Ranks write it under
a temporary name while training continues; when everything is on disk, the first rank renames it.
``latest`` names the newest. For a different number of ranks or ZeRO stage, DeepSpeed first converts
the checkpoint to its universal format.

``CheckpointStore`` saves, finds and loads; ``WrittenFiles`` writes the files in a thread, from
torch's copy of the state in host memory. DeepSpeed's own writers report a full disk as "unexpected
pos", do not fsync, and leave ranks in a barrier or die without an error; it cannot convert files of
torch's DCP to a different number of ranks.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from megapack.errors import ResumeError
from megapack.storage.files import AtomicFile, Buffer, atomic_write, publish
from megapack.storage.locks import make_own_folder, remove_own_folder
from megapack.training.engine.directory import (
    MANIFEST,
    CheckpointManifest,
    FileFacts,
    Verify,
    step_of,
    tags_in,
    tokens_of,
)
from megapack.training.engine.engine import not_finite
from megapack.training.engine.mirror import Mirror
from megapack.training.engine.world import RankProgress, World

_WRITER = ThreadPoolExecutor(1, "checkpoint")


class WrittenFiles:
    """Files of a checkpoint that this rank writes.

    Attributes:
        files: relative name -> size and checksum, for the manifest (listing a shared directory may
            miss files of other nodes).
        problem: the first failure, after which nothing more is written.
    """

    def __init__(
        self, directory: Path, progress: RankProgress, stager: DefaultStager | None = None
    ) -> None:
        self.directory, self.progress = directory, progress
        self.files: dict[str, FileFacts] = {}
        self.problem: str | None = None
        self._stager = stager
        self._copies: list[tuple[Any, str]] = []
        self._writing: Future[None] | None = None
        # The thread's progress counts for the rank only while the rank waits for it.
        self._written = progress if stager is None else RankProgress()

    def save(self, state_dict: Any, path: str) -> None:
        """Copy or write one file; replaces the method of DeepSpeed's checkpoint engine."""
        if self._stager is None:
            self._write(state_dict, path)
        else:
            self._copies.append((self._stager.stage(state_dict), path))

    def start(self) -> None:
        self._writing = _WRITER.submit(self._write_copies)

    @property
    def is_complete(self) -> bool:
        """True if the thread has written all files or has failed."""
        return self._writing is not None and self._writing.done()

    def wait(self) -> None:
        assert self._writing is not None, "start() comes first"
        self.progress.wait(self._writing, self._written)

    def _write_copies(self) -> None:
        while self._copies:
            self._write(*self._copies.pop(0))

    def _write(self, state_dict: Any, path: str) -> None:
        if self.problem is not None:
            return
        file = None
        try:
            file = _ChecksummedFile(path, self._written)
            torch.save(state_dict, file)  # type: ignore[arg-type]  # uses write and flush only
            publish(file.file)
        except (OSError, RuntimeError) as error:
            free = shutil.disk_usage(self.directory.parent).free
            self.problem = f"{(file and file.error) or error} ({free / 1e6:,.0f} MB free)"
            return
        name = os.path.relpath(path, self.directory)
        self.files[name] = FileFacts(bytes=file.num_bytes, xxh3=file.sum.hexdigest())


class _ChecksummedFile:
    """File for ``torch.save`` that computes a checksum."""

    def __init__(self, path: str, progress: RankProgress) -> None:
        self._progress = progress
        self.file = AtomicFile(path)
        self.sum = xxhash.xxh3_128()
        self.num_bytes = 0
        self.error: OSError | None = None
        """Error of the disk; torch raises an unrelated one for it."""

    def write(self, data: Buffer) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sum.update(data)
        self.num_bytes += memoryview(data).nbytes
        self._progress.inside(f"writing {self.file.path.name}")
        return memoryview(data).nbytes

    def flush(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Checkpoint to resume from, and how to load it."""

    tag: str
    manifest: CheckpointManifest
    universal: bool
    """Convert to the universal format first: the world size or the ZeRO stage differs."""
    rejected: list[str] = field(default_factory=list)  # problems of newer, damaged checkpoints


class CheckpointStore:
    """Checkpoints of one run. All methods but ``tags`` are collective.

    Args:
        directory: directory of the checkpoints, shared by all nodes.
        keep, asynchronous: as in ``CheckpointConfig``.
        zero_stage: ZeRO stage of the engine that saves and loads.
        scratch: folder for universal checkpoints; None: ``directory``.
        is_milestone: returns True for a step whose checkpoint is never removed.
        reach: steps that a rollback may undo; the newest checkpoint at least this old is kept, too.
        mirror: receives a copy of every checkpoint; None: no copies.
    """

    def __init__(
        self,
        directory: Path,
        world: World,
        *,
        keep: int,
        zero_stage: int,
        asynchronous: bool = False,
        scratch: Path | None = None,
        is_milestone: Callable[[int], bool] = lambda _: False,
        reach: int = 0,
        mirror: Mirror | None = None,
    ) -> None:
        self.directory, self.world, self.keep = directory, world, keep
        self.is_milestone, self.reach, self.mirror = is_milestone, reach, mirror
        self.zero_stage, self.scratch = zero_stage, scratch or directory
        cuda = torch.cuda.is_available()
        copies = StagingOptions(  # the copies reuse their host memory
            use_pinned_memory=cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=cuda,
        )
        self._stager = DefaultStager(copies) if asynchronous else None
        self._begun: tuple[str, WrittenFiles, dict[str, Any]] | None = None

    def tags(self) -> list[str]:
        """Return the names of the checkpoints, damaged ones included, by tokens seen."""
        return tags_in(self.directory)

    def begin(self, engine: Any, step: int, tokens: int, state: dict[str, Any]) -> None:
        """Start a checkpoint of the current state; ``finish`` publishes it.

        With ``asynchronous`` this returns when everything is copied to host memory. ``tokens``,
        those of all steps with padding, define which checkpoint is the newest. The manifest will
        contain ``state``. Raises FloatingPointError if a weight is not finite, and the errors of
        ``finish``.
        """
        self.finish()
        tag = f"step_{step:08d}_tokens_{tokens}"
        partial = self.directory / f"{tag}.partial"
        bad = not_finite(engine.module)
        what = f"checkpoint {tag} is not written: weights are not finite"
        self.world.fail_together(", ".join(bad[:3]) or None, what, FloatingPointError)
        self.world.on_first(self._clear_partial)
        self.world.on_first(lambda: make_own_folder(partial))
        files = WrittenFiles(partial, self.world.progress, self._stager)
        writer = engine.checkpoint_engine
        original, writer.save = writer.save, files.save
        try:  # without DeepSpeed's `latest`, which would name an incomplete directory
            client_state = {"megapack": state}
            engine.save_checkpoint(
                str(self.directory), partial.name, client_state=client_state, save_latest=False
            )
        finally:
            writer.save = original
        if engine.weight_average is not None:
            engine.weight_average.save(files.save, partial)
        files.start()
        self._begun = tag, files, {"step": step, "state": state}

    @property
    def is_written(self) -> bool:
        """True if this rank has written its part of the checkpoint that was started."""
        return self._begun is not None and self._begun[1].is_complete

    def finish(self) -> str | None:
        """Wait for all ranks, publish the checkpoint (in place of one of the same name), and remove
        older ones beyond ``keep``; return its name, or None if none was started. Raises ResumeError
        if a rank could not write; then the checkpoint is removed."""
        if self._begun is None:
            return None
        (tag, written, facts), self._begun = self._begun, None
        written.wait()
        problem = written.problem
        problem = problem and f"rank {self.world.rank} on {self.world.host}: {problem}"
        files: dict[str, FileFacts] = {}
        for part in self.world.gather(written.files):
            files |= part
        try:
            self.world.fail_together(problem, f"checkpoint {tag} could not be written")
        except ResumeError:
            self.world.on_first(self._clear_partial)  # free the disk
            raise
        manifest = CheckpointManifest(
            world_size=self.world.size,
            zero_stage=self.zero_stage,
            files=dict(sorted(files.items())),
            **facts,
        )
        self.world.on_first(lambda: self._publish(tag, manifest))
        return tag

    def wait_for_mirror(self) -> None:
        if self.mirror is not None:
            self.world.on_first(self.mirror.wait)

    def _clear_partial(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for folder in self.directory.glob("step_*.partial"):
            remove_own_folder(folder)
        _remove_universal(self.directory)

    def _publish(self, tag: str, manifest: CheckpointManifest) -> None:
        partial = self.directory / f"{tag}.partial"
        manifest.write(partial)
        self._remove(tag)
        partial.rename(self.directory / tag)
        with atomic_write(self.directory / "latest", "w") as file:  # also syncs the directory
            file.write(tag)
        tags = self.tags()
        reached = [old for old in tags if step_of(old) <= step_of(tag) - self.reach]
        for old in tags[: max(0, tags.index(tag) + 1 - self.keep)]:
            if old not in reached[-1:] and not self.is_milestone(step_of(old)):
                self._remove(old)
        if self.mirror is not None:
            self.mirror.copy(self.directory, self.tags(), tag)

    def _remove(self, tag: str) -> None:
        # Rename first: a partly removed checkpoint must not look like one.
        if (self.directory / tag).exists():
            shutil.rmtree((self.directory / tag).rename(self.directory / f"{tag}.old.partial"))

    def find(
        self,
        *,
        verify: Verify,
        fallback: bool = False,
        among: Callable[[str], bool] = lambda _: True,
    ) -> Resume | None:
        """Return the newest good checkpoint; None if the run has no checkpoints.

        Args:
            verify: compare sizes, or checksums of all bytes.
            fallback: skip damaged checkpoints instead of raising.
            among: returns True for the names to consider.

        Raises ResumeError if the newest is damaged and ``fallback`` is off, if all are damaged, or
        if DeepSpeed cannot convert its ZeRO stage.
        """
        rejected: dict[str, str] = {}
        for tag in reversed(self.world.on_first(self.tags)):  # ranks may list different tags
            if not among(tag):
                continue
            problems = self._problems(tag, verify)
            if not problems:
                manifest = CheckpointManifest.read(self.directory / tag)
                universal = self._needs_universal(manifest)
                self.world.on_first(lambda: self._set_aside(list(rejected)))
                reasons = list(rejected.values())
                return Resume(tag=tag, manifest=manifest, universal=universal, rejected=reasons)
            rejected[tag] = f"{self.directory / tag} is damaged: {'; '.join(problems)}"
            if not fallback:
                raise ResumeError(
                    f"{rejected[tag]}. Restore it, or set checkpoint.fallback=true to continue "
                    "from the one before"
                )
        if rejected:
            raise ResumeError(f"no checkpoint can be loaded: {'. '.join(rejected.values())}")
        return None

    def abandon_after(self, tag: str) -> None:
        """Remove the checkpoints with more tokens than ``tag``, to which the run rolls back, and
        set the newest of them aside. Collective."""
        self.world.on_first(lambda: self._abandon_after(tag))

    def _abandon_after(self, tag: str) -> None:
        newer = [other for other in self.tags() if tokens_of(other) > tokens_of(tag)]
        if newer:
            for old in self.directory.glob("step_*.abandoned"):
                remove_own_folder(old)
            self._set_aside(newer[-1:], "abandoned")
            for other in newer[:-1]:
                self._remove(other)
            with atomic_write(self.directory / "latest", "w") as file:
                file.write(tag)
            if self.mirror is not None:
                self.mirror.keep_only(self.directory, self.tags())

    def _set_aside(self, tags: list[str], kind: str = "damaged") -> None:
        # A directory with such a name is no longer treated as a checkpoint.
        for tag in tags:
            target = self.directory / f"{tag}.{kind}"
            remove_own_folder(target)
            (self.directory / tag).rename(target)

    def _needs_universal(self, manifest: CheckpointManifest) -> bool:
        """Return True if the checkpoint needs conversion for this world size and ZeRO stage."""
        before, now = manifest.zero_stage, self.zero_stage
        if before != now and not {before, now} <= {1, 2}:
            raise ResumeError(
                f"the checkpoint was written with ZeRO-{before} and this run has ZeRO-{now}: "
                f"DeepSpeed cannot convert optimizer state between the two. Set "
                f"engine.zero_stage={before}, or start a new run from the exported model"
            )
        if now == 0:  # every rank has the whole state, so any number of ranks can load it
            return False
        return (manifest.world_size, before) != (self.world.size, now)

    def load(self, engine: Any, resume: Resume) -> None:
        """Load a checkpoint that ``find`` returned. Raises ResumeError if DeepSpeed refuses it
        (different model, optimizer or precision), or if the manifest belongs to different weights.
        """
        folder = self.directory / resume.tag
        if resume.universal and any(g.get("use_muon") for g in engine.optimizer.param_groups):
            raise ResumeError(
                f"{folder}: DeepSpeed's universal checkpoints cannot store Muon's momentum; "
                f"continue with {resume.manifest.world_size} ranks and "
                f"ZeRO-{resume.manifest.zero_stage}, or start a new run from the exported model"
            )
        if resume.universal:
            folder = self.world.on_first(lambda: self._convert(resume.tag))
        # DeepSpeed reads this at every load, and a rollback may load the other format.
        engine._config.load_universal_checkpoint = resume.universal
        with _keep_settings(engine):
            try:
                path, saved = engine.load_checkpoint(str(folder.parent), tag=folder.name)
                problem = None if path else "DeepSpeed found nothing to load"
                if path and json.dumps(saved["megapack"]) != json.dumps(resume.manifest.state):
                    problem = f"{MANIFEST} is damaged: its state differs from that in the weights"
            except (OSError, RuntimeError, ValueError, KeyError, AssertionError) as error:
                problem = f"{type(error).__name__}: {error}"
        self.world.fail_together(problem, f"checkpoint {folder} does not fit this run")
        if engine.weight_average is not None:
            engine.weight_average.load(self.directory / resume.tag)
        if resume.universal:
            # With ZeRO-3 all parts share one step tensor, which each would increment: copy it.
            for state in engine.optimizer.optimizer.state.values():
                if "step" in state:
                    state["step"] = deepcopy(state["step"])
            self.world.on_first(lambda: shutil.rmtree(folder, ignore_errors=True))
            self.world.on_first(lambda: (self.scratch / "latest_universal").unlink(missing_ok=True))

    def _convert(self, tag: str) -> Path:
        """Convert to the universal format, in a new folder; return the folder."""
        # Use a unique name: the converter of a killed process may still be running.
        _remove_universal(self.scratch)
        universal = self.scratch / f"{tag}.{uuid.uuid4().hex}.universal"
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--input_folder", str(self.directory / tag)]
        command += ["--output_folder", str(universal), "--inject_missing_state"]
        # With these variables the converter would join this run's process group.
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=env)
            try:
                place = f"rewriting {tag} for this number of ranks"
                with self.world.progress.while_written(universal, place):
                    process.wait()
            except BaseException:
                process.kill()
                process.wait()
                raise
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no message"])[-1]
        if process.returncode != 0:
            raise ResumeError(
                f"checkpoint {tag} cannot be converted for this number of ranks or ZeRO "
                f"stage: {last}"
            )
        return universal

    def _problems(self, tag: str, verify: Verify) -> list[str]:
        """Return the faults of a checkpoint; ranks share the work and get the same list."""
        faults: list[str] = []
        try:
            manifest = CheckpointManifest.read(self.directory / tag)
        except ResumeError as error:
            faults = [str(error)]
        else:
            for name in sorted(manifest.files)[self.world.rank :: self.world.size]:
                place = f"the check of {tag}/{name}"
                read = functools.partial(self.world.progress.inside, place)
                problem = manifest.files[name].problem(self.directory / tag / name, verify, read)
                if problem:
                    faults.append(f"{name} {problem}")
        return sorted({fault for part in self.world.gather(faults) for fault in part})


def _remove_universal(directory: Path) -> None:
    # Left behind by a killed process; ``_convert`` puts 32 random hex digits into the name.
    for folder in directory.glob(f"step_*.{'[0-9a-f]' * 32}.universal"):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _keep_settings(engine: Any) -> Iterator[None]:
    """Keep the configured settings of the optimizer (weight decay, betas, clipping), which
    DeepSpeed would otherwise replace with those of the saved run."""
    clip = getattr(engine.optimizer, "clip_grad", None)  # None without ZeRO, see ``clip_and_skip``
    configured = [
        {name: value for name, value in group.items() if name != "params"}
        for group in engine.optimizer.param_groups
    ]
    yield
    for group, settings in zip(engine.optimizer.param_groups, configured, strict=True):
        group.update(settings)
    if clip is not None:
        engine.optimizer.clip_grad = clip
