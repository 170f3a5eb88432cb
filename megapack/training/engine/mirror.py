"""Copies of checkpoints in an object store, written behind the training; back from there.

``Mirror`` is given every checkpoint that is complete on the disk, and a ``run_dir`` without any is
filled from it. With checkpoints of 1,000 and 2,000 steps in s3://bucket/run:

    s3://bucket/run/run_id  # whose store it is, as in that run_dir
    s3://bucket/run/log.jsonl  # and evaluation.jsonl: rules of mixtures look back on them
    s3://bucket/run/step_00001000_tokens_4096000/zero_pp_rank_0_mp_rank_00_optim_states.pt ...
    s3://bucket/run/step_00001000_tokens_4096000.manifest.json
    s3://bucket/run/step_00002000_tokens_8192000/...  # no manifest yet: it is being copied
    Mirror("s3://bucket/run").restore(run_dir / "checkpoints")  # -> "step_00001000_tokens_4096000"
"""

from __future__ import annotations

import functools
import logging
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megapack.errors import ConfigError, FormatError, MegapackError, ResumeError
from megapack.storage.files import atomic_write
from megapack.storage.remote.cache import open_cache
from megapack.storage.remote.client import (
    RemoteObject,
    find_object,
    names_in,
    put_object,
    remove_object,
)
from megapack.training.engine.directory import LOGS, RUN_ID, RunDirectory, tags_in, tokens_of
from megapack.training.engine.manifest import MANIFEST, CheckpointManifest, FileFacts
from megapack.training.engine.world import RankProgress

_MIRRORED = ".manifest.json"
_MIRROR = ThreadPoolExecutor(1, "mirror")
logger = logging.getLogger("megapack")


class Mirror:
    """Checkpoints in an object store, for a node whose disk is lost.

    Objects are ``<address>/<tag>/<file>`` and, last of all, ``<address>/<tag>.manifest.json``: a
    checkpoint is complete there or absent; the logs that led to it are there before. They are
    copied in a thread while training goes on, one checkpoint at a time; where one is not done when
    the next is there, that one is left out, but not the last of a run. What the directory no longer
    has is removed. A failure is said and does not stop the run. The store is that of the run which
    copied there first, or is restored from there: no other one copies or removes anything.

    Args:
        address: of the store.
        progress: of this rank, which goes on while it waits for files; None: nobody looks at it.
    """

    def __init__(self, address: str, progress: RankProgress | None = None) -> None:
        self.address = address.rstrip("/")
        self._progress = progress or RankProgress()
        self._copied = RankProgress()  # of the thread
        self._copying: Future[None] | None = None
        self._left_out: tuple[Path, list[str], str] | None = None

    def check_owner(self, run: RunDirectory) -> str | None:
        """The ``run_id`` of the store, None where it has none yet. Raises ConfigError: it is not
        that of this run, whose directory is not empty."""
        found = find_object(f"{self.address}/{RUN_ID}")
        owner = found and bytes(found.read(0, found.num_bytes)).decode().strip()
        if owner and owner != run.known_id and (run.known_id or tags_in(run.checkpoints)):
            raise ConfigError(
                f"checkpoint.mirror is {self.address}, which is that of another run than {run.path}"
                f": what it has there would be removed; give another address or, where it is this "
                f"run after all, copy {self.address}/{RUN_ID} into {run.path}"
            )
        return owner or None

    def copy(self, directory: Path, tags: list[str], tag: str) -> None:
        """Begin to copy a checkpoint of the directory, which holds these."""
        if self._copying is not None and not self._copying.done():
            logger.warning(
                "%s: still busy with a checkpoint before, %s left out", self.address, tag
            )
            self._left_out = directory, tags, tag
            return
        self._left_out = None
        self._copying = _MIRROR.submit(self._copy, directory, tags, tag)

    def wait(self) -> None:
        """Until what was begun is done, and the newest checkpoint is not left out."""
        self._progress.wait(_MIRROR.submit(int), self._copied)
        if self._left_out is not None:
            self.copy(*self._left_out)
            self._progress.wait(_MIRROR.submit(int), self._copied)

    def _copy(self, directory: Path, tags: list[str], tag: str) -> None:
        try:
            manifest = CheckpointManifest.read(directory / tag)
            run = RunDirectory(directory.parent)
            if self.check_owner(run) is None:
                run.own_id()
                put_object(f"{self.address}/{RUN_ID}", run.path / RUN_ID)
            remove_object(f"{self.address}/{tag}{_MIRRORED}")  # of a path that the run left
            copied = functools.partial(self._copied.inside, f"copying {tag} to its mirror")
            for name in manifest.files:
                put_object(f"{self.address}/{tag}/{name}", directory / tag / name, copied)
            for log in (directory.parent / name for name in LOGS):
                if log.exists():
                    put_object(f"{self.address}/{log.name}", log)
            put_object(f"{self.address}/{tag}{_MIRRORED}", directory / tag / MANIFEST)
        except (OSError, MegapackError) as error:
            logger.warning("checkpoint %s is not at %s: %s", tag, self.address, error)
        else:
            self._remove_all_but(directory, tags)

    def keep_only(self, directory: Path, tags: list[str]) -> None:
        """Begin to remove all others: the run of the directory left their path."""
        _MIRROR.submit(self._remove_all_but, directory, tags)  # after a copy that was begun

    def _remove_all_but(self, directory: Path, tags: list[str]) -> None:
        try:
            self.check_owner(RunDirectory(directory.parent))
            for old in set(self.tags()) - set(tags):
                self._remove(old)
        except (OSError, MegapackError) as error:
            logger.warning("%s: old checkpoints stay: %s", self.address, error)

    def _remove(self, tag: str) -> None:
        url = f"{self.address}/{tag}{_MIRRORED}"
        with tempfile.TemporaryDirectory() as folder:
            found = find_object(url)
            names = [] if found is None else list(_fetched(found, tag, Path(folder) / "m").files)
        remove_object(url)  # first, so that what is left is not taken for a checkpoint
        for name in names:
            remove_object(f"{self.address}/{tag}/{name}")

    def tags(self) -> list[str]:
        """The checkpoints that are complete there, by tokens seen."""
        try:
            names = [name.rpartition("/")[2] for name in names_in(self.address)]
        except FileNotFoundError:  # a folder of a file system, before the first checkpoint
            names = []
        own = (n for n in names if n.startswith("step_") and n.endswith(_MIRRORED))
        return sorted((name.removesuffix(_MIRRORED) for name in own), key=tokens_of)

    def restore(self, directory: Path, at_most: int | None = None) -> str | None:
        """Bring the newest checkpoint, of those after so many tokens or fewer, into a directory
        that has none, and the logs beside it; its name.

        Raises:
            ResumeError: a file is missing.
            FormatError: one is not what its manifest says, again and again.
            ConfigError: the store is another run's, or as of OSError.
            OSError: it cannot be read.
        """
        run = RunDirectory(directory.parent)
        owner = self.check_owner(run)
        known = [tag for tag in self.tags() if at_most is None or tokens_of(tag) <= at_most]
        if not known:
            return None
        tag = known[-1]
        found = find_object(f"{self.address}/{tag}{_MIRRORED}")
        assert found is not None, "listed just now"
        came = functools.partial(self._progress.inside, f"restoring {tag} from its mirror")
        partial = directory / f"{tag}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        manifest = _fetched(found, tag, partial / MANIFEST)
        for name, expected in manifest.files.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            file = find_object(f"{self.address}/{tag}/{name}")
            if file is None:
                raise ResumeError(f"{self.address}/{tag}/{name} is missing")
            check = functools.partial(_check, expected, came)
            open_cache().fetch(file, partial / name, check, came)
        for log in (directory.parent / name for name in LOGS):
            if not log.exists() and (lines := find_object(f"{self.address}/{log.name}")):
                open_cache().fetch(lines, log)
        run.own_id(owner)
        partial.rename(directory / tag)
        with atomic_write(directory / "latest", "w") as latest:
            latest.write(tag)
        return tag


def _check(expected: FileFacts, progress: Callable[[], object], path: Path) -> None:
    """Check a file that was fetched. Raises FormatError: it is not as in its manifest."""
    problem = expected.problem(path, "checksum", progress)
    if problem is not None:
        raise FormatError(f"{path} {problem}")


def _fetched(found: RemoteObject, tag: str, path: Path) -> CheckpointManifest:
    """Copy a manifest of the store to ``path`` and read it. Raises ResumeError: it is damaged."""
    open_cache().fetch(found, path)
    return CheckpointManifest.read(Path(tag), path)
