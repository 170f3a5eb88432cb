"""Checkpoints: complete or absent, checked before they are loaded, for any number of ranks.

``<directory>/step_00001000_tokens_4194304000/`` holds DeepSpeed's files and ``manifest.json``
(step, world size, state of the data order, size and checksum of every file). It is written under
another name, while training goes on, and renamed when everything is on the disk; ``latest`` names
the newest. With another number of ranks or another ZeRO stage the checkpoint is first rewritten as
a DeepSpeed universal checkpoint.

``CheckpointStore`` saves, finds and loads; ``WrittenFiles`` writes the files (``manifest.py``: the
manifest; ``mirror.py``: copies in an object store). DeepSpeed writes with
``torch.save(path)``, whose C++ writer reports a full disk as "unexpected pos", and without fsync;
and a rank that raised there would leave the others in a barrier. Its own asynchronous engines give
neither checksums nor fsync, and its writer process ends in silence; torch's (DCP) writes files that
DeepSpeed cannot convert for other ranks. So the copy to the host is torch's, the files stay
DeepSpeed's, and a thread writes them.
"""

from __future__ import annotations

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
from megapack.training.engine.directory import step_of, tags_in, tokens_of
from megapack.training.engine.engine import not_finite
from megapack.training.engine.manifest import MANIFEST, CheckpointManifest, FileFacts, Verify
from megapack.training.engine.mirror import Mirror
from megapack.training.engine.world import RankProgress, World

_WRITER = ThreadPoolExecutor(1, "checkpoint")


class WrittenFiles:
    """Files that this rank wrote, so that nobody has to list a directory that others write to.

    Args:
        directory: of the checkpoint.
        progress: of this rank, which goes on while it waits for files.
        stager: copies state to the host; None: ``save`` writes at once.

    Attributes:
        files: relative name -> ``bytes`` and ``xxh3``.
        problem: the first failure; nothing is written after it.
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
        self._writing = _WRITER.submit(self._write_copies)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be written, or can be."""
        return self._writing is not None and self._writing.done()

    def wait(self) -> None:
        """Until it is."""
        assert self._writing is not None, "start() comes first"
        self.progress.wait(self._writing, self._steps)

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
        self.files[name] = FileFacts(bytes=file.num_bytes, xxh3=file.sum.hexdigest())


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
        self._progress.inside(f"writing {self.file.path.name}")
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Nothing is held back."""


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
    """The checkpoints of one run, as ``CheckpointConfig`` has them. All methods but ``tags`` are
    collective.

    Args:
        directory: shared by all nodes.
        keep, asynchronous: of ``CheckpointConfig``.
        zero_stage: of the engine that saves and loads.
        scratch: where a checkpoint is rewritten for other ranks; None: beside it.
        is_milestone: of a number of steps, whether its checkpoint stays.
        reach: steps that the run may have to take back: the newest checkpoint that is so many
            behind stays, however many came after it, of signals too.
        mirror: where every checkpoint is copied to; None: nowhere.
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
        copies = StagingOptions(  # to the host, where their memory is kept and used again
            use_pinned_memory=cuda,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=cuda,
        )
        self._stager = DefaultStager(copies) if asynchronous else None
        self._begun: tuple[str, WrittenFiles, dict[str, Any]] | None = None

    def tags(self) -> list[str]:
        """Names of the checkpoints by tokens seen, damaged ones included."""
        return tags_in(self.directory)

    def begin(self, engine: Any, step: int, tokens: int, state: dict[str, Any]) -> None:
        """Take a checkpoint of the present; it counts when ``finish`` returns.

        With ``asynchronous`` this returns when everything was copied to the host.

        Args:
            engine: of ``start_engine``.
            step: optimizer steps that were done.
            tokens: of all these steps, padding included; decides which checkpoint is the newest.
            state: goes into the manifest.

        Raises:
            FloatingPointError: a weight is infinite or not a number.
            ResumeError: as ``finish``, of one that was begun before.
        """
        self.finish()
        tag = f"step_{step:08d}_tokens_{tokens}"
        partial = self.directory / f"{tag}.partial"
        bad = not_finite(engine.module)
        what = f"checkpoint {tag} is not written: weights are not finite"
        self.world.fail_together(", ".join(bad[:3]) or None, what, FloatingPointError)
        self.world.on_first(self._clear_partial)
        files = WrittenFiles(partial, self.world.progress, self._stager)
        theirs = engine.checkpoint_engine
        original, theirs.save = theirs.save, files.save
        try:  # no `latest` from DeepSpeed: it would name a directory before it is complete
            client_state = {"megapack": state}
            engine.save_checkpoint(
                str(self.directory), partial.name, client_state=client_state, save_latest=False
            )
        finally:
            theirs.save = original
        if engine.weight_average is not None:
            engine.weight_average.save(files.save, partial)
        files.start()
        self._begun = tag, files, {"step": step, "state": state}

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its part of a checkpoint that waits for ``finish``."""
        return self._begun is not None and self._begun[1].is_complete

    def finish(self) -> str | None:
        """Wait until all ranks have written, publish, and remove checkpoints beyond ``keep``.

        Returns:
            The checkpoint's name; None when none was begun. Of the same name it replaces one.

        Raises:
            ResumeError: some rank could not write; nothing appears under the final name.
        """
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
            self.world.on_first(self._clear_partial)  # half of it may fill the disk
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
        """Until copies that were begun are done; collective."""
        if self.mirror is not None:
            self.world.on_first(self.mirror.wait)

    def _clear_partial(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        _remove_left(self.directory, "partial", "universal")

    def _publish(self, tag: str, manifest: CheckpointManifest) -> None:
        partial = self.directory / f"{tag}.partial"
        manifest.write(partial)
        self._remove(tag)
        partial.rename(self.directory / tag)
        with atomic_write(self.directory / "latest", "w") as file:  # syncs the directory, too
            file.write(tag)
        newest = self.tags()
        behind = [old for old in newest if step_of(old) <= step_of(tag) - self.reach]
        for old in newest[: max(0, newest.index(tag) + 1 - self.keep)]:
            if old not in behind[-1:] and not self.is_milestone(step_of(old)):
                self._remove(old)
        if self.mirror is not None:
            self.mirror.copy(self.directory, self.tags(), tag)

    def _remove(self, tag: str) -> None:
        """A checkpoint half removed must not look like one."""
        if (self.directory / tag).exists():
            gone = (self.directory / tag).rename(self.directory / f"{tag}.old.partial")
            shutil.rmtree(gone)

    def find(
        self,
        *,
        verify: Verify,
        fallback: bool = False,
        among: Callable[[str], bool] = lambda _: True,
    ) -> Resume | None:
        """The newest good checkpoint; None when the run has none.

        Args:
            verify: compare sizes, or read every file and compare checksums.
            fallback: skip damaged checkpoints instead of refusing to start.
            among: of a checkpoint's name, whether it is looked at.

        Raises:
            ResumeError: the newest is damaged and ``fallback`` is off, or all are; or it is of a
                ZeRO stage that cannot be carried over.
        """
        rejected: dict[str, str] = {}
        for tag in reversed(self.world.on_first(self.tags)):  # one view, if a shared disk lags
            if not among(tag):
                continue
            problems = self._problems(tag, verify)
            if not problems:
                manifest = CheckpointManifest.read(self.directory / tag)
                universal = self._needs_universal(manifest)
                self.world.on_first(lambda: self._set_aside(list(rejected)))
                why = list(rejected.values())
                return Resume(tag=tag, manifest=manifest, universal=universal, rejected=why)
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
        """Checkpoints of more tokens than this one are of a path that the run left: aside, and only
        the newest of them is kept; collective."""
        self.world.on_first(lambda: self._abandon_after(tag))

    def _abandon_after(self, tag: str) -> None:
        newer = [other for other in self.tags() if tokens_of(other) > tokens_of(tag)]
        if newer:
            for old in self.directory.glob("step_*.abandoned"):
                shutil.rmtree(old)
            self._set_aside(newer[-1:], "abandoned")
            for other in newer[:-1]:
                self._remove(other)
            with atomic_write(self.directory / "latest", "w") as file:
                file.write(tag)  # or of its trunk
            if self.mirror is not None:
                self.mirror.keep_only(self.directory, self.tags())

    def _set_aside(self, tags: list[str], kind: str = "damaged") -> None:
        """Checkpoints keep their files under a name that nobody loads or prunes."""
        for tag in tags:
            target = self.directory / f"{tag}.{kind}"
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
            ResumeError: DeepSpeed refuses it (another model, optimizer or precision), or the
                manifest is not that of its weights.
        """
        place = self.directory / resume.tag
        if resume.universal and any(g.get("use_muon") for g in engine.optimizer.param_groups):
            raise ResumeError(
                f"{place}: DeepSpeed's universal checkpoints have no place for Muon's momentum; go "
                f"on with {resume.manifest.world_size} ranks and "
                f"ZeRO-{resume.manifest.zero_stage}, or begin anew from the exported model"
            )
        if resume.universal:
            place = self.world.on_first(lambda: self._convert(resume.tag))
        # DeepSpeed asks its configuration at every load, and a run that goes back loads both kinds.
        engine._config.load_universal_checkpoint = resume.universal
        with _own_settings(engine):
            try:
                path, saved = engine.load_checkpoint(str(place.parent), tag=place.name)
                problem = None if path else "DeepSpeed found nothing to load"
                if path and json.dumps(saved["megapack"]) != json.dumps(resume.manifest.state):
                    problem = f"{MANIFEST} is damaged: its state is not that of the weights"
            except (OSError, RuntimeError, ValueError, KeyError, AssertionError) as error:
                problem = f"{type(error).__name__}: {error}"
        self.world.fail_together(problem, f"checkpoint {place} does not fit this run")
        if engine.weight_average is not None:
            engine.weight_average.load(self.directory / resume.tag)
        if resume.universal:
            # With ZeRO-3 DeepSpeed gives all parts one step count, and each of them would raise it.
            for state in engine.optimizer.optimizer.state.values():
                if "step" in state:
                    state["step"] = deepcopy(state["step"])
            self.world.on_first(lambda: shutil.rmtree(place, ignore_errors=True))
            self.world.on_first(lambda: (self.scratch / "latest_universal").unlink(missing_ok=True))

    def _convert(self, tag: str) -> Path:
        """Into a folder of this start's own: the converter of one that was killed may go on."""
        _remove_left(self.scratch, "universal")
        universal = self.scratch / f"{tag}.{uuid.uuid4().hex}.universal"
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        command += ["--input_folder", str(self.directory / tag)]
        command += ["--output_folder", str(universal), "--inject_missing_state"]
        # Its own process group variables would make the converter join this run.
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=env)
            try:
                place = f"rewriting {tag} for this number of ranks"
                with self.world.progress.while_written(universal, place):
                    process.wait()
            except BaseException:
                process.kill()
                process.wait()
                raise
            said.seek(0)
            last = (said.read().strip().splitlines() or ["no message"])[-1]
        if process.returncode != 0:
            raise ResumeError(
                f"checkpoint {tag} cannot be rewritten for another number of ranks or ZeRO "
                f"stage: {last}"
            )
        return universal

    def _problems(self, tag: str, verify: Verify) -> list[str]:
        """Faults of a checkpoint, the same list on every rank."""
        mine: list[str] = []
        try:
            manifest = CheckpointManifest.read(self.directory / tag)
        except ResumeError as error:
            mine = [str(error)]
        else:
            for name in sorted(manifest.files)[self.world.rank :: self.world.size]:
                place = f"the check of {tag}/{name}"
                read = functools.partial(self.world.progress.inside, place)
                problem = manifest.files[name].problem(self.directory / tag / name, verify, read)
                if problem:
                    mine.append(f"{name} {problem}")
        return sorted({problem for part in self.world.gather(mine) for problem in part})


def _remove_left(directory: Path, *kinds: str) -> None:
    """What a start that was killed has left."""
    for kind in kinds:
        for leftover in directory.glob(f"step_*.{kind}"):
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _own_settings(engine: Any) -> Iterator[None]:
    """The optimizer keeps what this run's configuration says (weight decay, betas, clipping): with
    its state DeepSpeed loads those of the run that saved it."""
    clip = getattr(engine.optimizer, "clip_grad", None)  # none without ZeRO: ``clip_and_skip``
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in engine.optimizer.param_groups
    ]
    yield
    for group, own in zip(engine.optimizer.param_groups, groups, strict=True):
        group.update(own)
    if clip is not None:
        engine.optimizer.clip_grad = clip
