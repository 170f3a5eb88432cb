"""Copies of checkpoints in an object store: ``Mirror`` uploads them and restores them.

With checkpoints of 1,000 and 2,000 steps in s3://bucket/run:

    s3://bucket/run/run_id  # id of the run that owns the store
    s3://bucket/run/log.jsonl  # also evaluation.jsonl and audit.jsonl: mixing rules need the log
    s3://bucket/run/step_00001000_tokens_4096000/zero_pp_rank_0_mp_rank_00_optim_states.pt ...
    s3://bucket/run/step_00001000_tokens_4096000.manifest.json
    s3://bucket/run/step_00002000_tokens_8192000/...  # upload in progress: no manifest yet
    Mirror("s3://bucket/run").restore(run_dir / "checkpoints")  # -> "step_00001000_tokens_4096000"
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megapack.errors import ConfigError, FormatError, MegapackError, ResumeError
from megapack.storage.files import atomic_write
from megapack.storage.locks import make_own_folder, remove_own_folder
from megapack.storage.remote import client
from megapack.storage.remote.cache import open_cache
from megapack.training.engine.directory import (
    AUDIT,
    LOGS,
    MANIFEST,
    RUN_ID,
    CheckpointManifest,
    FileFacts,
    RunDirectory,
    tags_in,
    tokens_of,
)
from megapack.training.engine.world import RankProgress

_MANIFEST_SUFFIX = ".manifest.json"
_THREAD = ThreadPoolExecutor(1, "mirror")
logger = logging.getLogger("megapack")


class Mirror:
    """Checkpoints of one run in an object store, in case a node loses its disk.

    A thread uploads a checkpoint while training continues: first the files, then the logs, and last
    ``<address>/<tag>.manifest.json``, without which a checkpoint does not count. If an upload is
    still running at the next checkpoint, the mirror skips that one, but never the last of a run. It
    removes checkpoints that the directory no longer has. A failed upload logs a warning. The first
    run that uploads to a store, or restores from it, owns it: mirrors of other runs change nothing.

    Args:
        progress: progress of this rank, updated while it waits for files; None: ignored.
    """

    def __init__(self, address: str, progress: RankProgress | None = None) -> None:
        self.address = address.rstrip("/")
        self._progress = progress or RankProgress()
        self._upload_progress = RankProgress()
        self._upload: Future[None] | None = None
        self._skipped: tuple[Path, list[str], str] | None = None

    def check_owner(self, run: RunDirectory) -> str | None:
        """Return the id of the run that owns the store; None if none does. Raises ConfigError if
        another run owns the store and this run has a ``run_id`` or checkpoints."""
        run_id = client.find_object(f"{self.address}/{RUN_ID}")
        owner = run_id and bytes(run_id.read(0, run_id.num_bytes)).decode().strip()
        if owner and owner != run.known_id and (run.known_id or tags_in(run.checkpoints)):
            raise ConfigError(
                f"checkpoint.mirror is {self.address}, which is that of another run than {run.path}"
                ": this run would remove its checkpoints; give another address or, if the mirror "
                f"does belong to this run, copy {self.address}/{RUN_ID} into {run.path}"
            )
        return owner or None

    def copy(self, directory: Path, tags: list[str], tag: str) -> None:
        """Start to upload checkpoint ``tag``; ``tags`` are all checkpoints of the directory."""
        if self._upload is not None and not self._upload.done():
            logger.warning("%s: still uploading a checkpoint, skipping %s", self.address, tag)
            self._skipped = directory, tags, tag
            return
        self._skipped = None
        self._upload = _THREAD.submit(self._copy, directory, tags, tag)

    def wait(self) -> None:
        """Wait for the upload in progress, and for the newest checkpoint if it was skipped."""
        self._progress.wait(_THREAD.submit(int), self._upload_progress)
        if self._skipped is not None:
            self.copy(*self._skipped)
            self._progress.wait(_THREAD.submit(int), self._upload_progress)

    def _copy(self, directory: Path, tags: list[str], tag: str) -> None:
        try:
            manifest = CheckpointManifest.read(directory / tag)
            run = RunDirectory(directory.parent)
            if self.check_owner(run) is None:
                run.create_id()
                client.put_object(f"{self.address}/{RUN_ID}", run.path / RUN_ID)
            # An abandoned checkpoint may have the same name.
            client.remove_object(f"{self.address}/{tag}{_MANIFEST_SUFFIX}")
            copied = functools.partial(self._upload_progress.inside, f"copying {tag} to its mirror")
            for name in manifest.files:
                client.put_object(f"{self.address}/{tag}/{name}", directory / tag / name, copied)
            for log in (directory.parent / name for name in (*LOGS, AUDIT)):
                if log.exists():
                    client.put_object(f"{self.address}/{log.name}", log)
            client.put_object(f"{self.address}/{tag}{_MANIFEST_SUFFIX}", directory / tag / MANIFEST)
        except (OSError, MegapackError) as error:
            logger.warning("checkpoint %s is not at %s: %s", tag, self.address, error)
        else:
            self._remove_all_but(directory, tags)

    def keep_only(self, directory: Path, tags: list[str]) -> None:
        """Start to remove all checkpoints but ``tags``; the run abandoned the others."""
        _THREAD.submit(self._remove_all_but, directory, tags)  # after an upload in progress

    def _remove_all_but(self, directory: Path, tags: list[str]) -> None:
        try:
            self.check_owner(RunDirectory(directory.parent))
            for old in set(self.tags()) - set(tags):
                self._remove(old)
        except (OSError, MegapackError) as error:
            logger.warning("%s: old checkpoints could not be removed: %s", self.address, error)

    def _remove(self, tag: str) -> None:
        url = f"{self.address}/{tag}{_MANIFEST_SUFFIX}"
        with tempfile.TemporaryDirectory() as folder:
            manifest = client.find_object(url)
            names = (
                [] if manifest is None else list(_fetch(manifest, tag, Path(folder) / "m").files)
            )
        client.remove_object(url)  # first, so that a partly removed checkpoint does not count
        for name in names:
            client.remove_object(f"{self.address}/{tag}/{name}")

    def tags(self) -> list[str]:
        """Return the names of the complete checkpoints in the store, sorted by tokens seen."""
        try:
            names = [name.rpartition("/")[2] for name in client.names_in(self.address)]
        except FileNotFoundError:  # a folder of a file system, before the first checkpoint
            names = []
        manifests = (n for n in names if n.startswith("step_") and n.endswith(_MANIFEST_SUFFIX))
        return sorted((name.removesuffix(_MANIFEST_SUFFIX) for name in manifests), key=tokens_of)

    def restore(self, directory: Path, at_most: int | None = None) -> str | None:
        """Download the newest checkpoint, and the logs, into a directory without checkpoints.

        Skips checkpoints of more than ``at_most`` tokens. Returns the checkpoint's name; None if
        the store has none. Raises ResumeError if a file is missing, FormatError if repeated
        downloads do not match the manifest, ConfigError if the store belongs to another run,
        OSError if it cannot be read.
        """
        run = RunDirectory(directory.parent)
        owner = self.check_owner(run)
        tags = [tag for tag in self.tags() if at_most is None or tokens_of(tag) <= at_most]
        if not tags:
            return None
        tag = tags[-1]
        manifest_object = client.find_object(f"{self.address}/{tag}{_MANIFEST_SUFFIX}")
        assert manifest_object is not None, "it was listed above"
        progress = functools.partial(self._progress.inside, f"restoring {tag} from its mirror")
        partial = directory / f"{tag}.partial"
        remove_own_folder(partial)
        directory.mkdir(parents=True, exist_ok=True)
        make_own_folder(partial)
        manifest = _fetch(manifest_object, tag, partial / MANIFEST)
        for name, expected in manifest.files.items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            file = client.find_object(f"{self.address}/{tag}/{name}")
            if file is None:
                raise ResumeError(f"{self.address}/{tag}/{name} is missing")
            check = functools.partial(_check, expected, progress)
            open_cache().fetch(file, partial / name, check, progress)
        for log in (directory.parent / name for name in (*LOGS, AUDIT)):
            if not log.exists() and (lines := client.find_object(f"{self.address}/{log.name}")):
                open_cache().fetch(lines, log)
        run.create_id(owner)
        partial.rename(directory / tag)
        with atomic_write(directory / "latest", "w") as latest:
            latest.write(tag)
        return tag


def _check(expected: FileFacts, progress: Callable[[], object], path: Path) -> None:
    """Check a downloaded file. Raises FormatError if it does not match its manifest."""
    problem = expected.problem(path, "checksum", progress)
    if problem is not None:
        raise FormatError(f"{path} {problem}")


def _fetch(manifest: client.RemoteObject, tag: str, path: Path) -> CheckpointManifest:
    """Download a manifest to ``path`` and read it. Raises ResumeError if it is damaged."""
    open_cache().fetch(manifest, path)
    return CheckpointManifest.read(Path(tag), path)
