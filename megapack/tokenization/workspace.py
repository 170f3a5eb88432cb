"""The directory of shards: whose it is, and what of a build is there already."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megapack.errors import ConfigError
from megapack.storage import IndexedDataset
from megapack.tokenization.config import BuildConfig
from megapack.tokenization.manifest import differences, read_manifest, write_manifest
from megapack.tokenization.record import RECORDS

__all__ = ["finished_build", "manifest_path", "work_directory"]

_SHOWN = 5


def manifest_path(config: BuildConfig) -> Path:
    """Of a finished build; written last."""
    return Path(f"{config.output_prefix}.manifest.json")


def finished_build(
    config: BuildConfig, prefixes: Sequence[str], plan: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The manifest of this very build, if it is finished already; None if it is to be done.

    Raises:
        ConfigError: something else stands under the output's name.
    """
    if config.overwrite:
        return None
    there = [prefix for prefix in prefixes if IndexedDataset.exists(prefix)]
    before = read_manifest(manifest_path(config))
    if before is not None and len(there) == len(prefixes):
        changed = differences(before, plan)
        if not changed:
            return before
        raise ConfigError(
            f"{config.output_prefix} was built from something else:\n  {_shown(changed)}\n"
            "Replace it with --overwrite, or choose another --output-prefix"
        )
    # Without its manifest an output is complete only if the shards it came from say so.
    if there and not _work_manifest(_work_dir(config)).exists():
        raise ConfigError(f"{there[0]}.bin/.idx exist; replace them with --overwrite")
    return None


@contextlib.contextmanager
def work_directory(work: Path, config: BuildConfig, plan: Mapping[str, Any]) -> Iterator[None]:
    """The directory of shards, made or found to belong to this plan, and ours alone.

    Raises:
        ConfigError: it holds shards of another plan, or another process works in it.
    """
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work, config.shard):
        path = _work_manifest(work)
        if config.overwrite and config.shard is None and not config.finish:
            manifest_path(config).unlink(missing_ok=True)  # it would speak of another dataset
            _empty(work)
        before = read_manifest(path)
        changed = [] if before is None else differences(before, plan)
        if changed and any(work.glob(RECORDS)) and not _differs_in_laxity(before, plan):
            raise ConfigError(
                f"{work} holds shards of another build:\n  {_shown(changed)}\n"
                "Start over with --overwrite, or undo the change to go on"
            )
        if before is None or changed:
            write_manifest(path, plan)
        yield


def _differs_in_laxity(before: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> bool:
    """Shards finished under ``--on-error fail`` had no faults: a build stopped by one goes on with
    ``--on-error skip``.
    """
    if before is None or before["options"]["on_error"] != "fail":
        return False
    lax = {**before, "options": {**before["options"], "on_error": "skip"}}
    return not differences(lax, plan)


def _work_dir(config: BuildConfig) -> Path:
    return Path(f"{config.output_prefix}.build")


def _work_manifest(work: Path) -> Path:
    return work / "manifest.json"


def _shown(changed: Sequence[str]) -> str:
    more = len(changed) - _SHOWN
    lines = [*changed[:_SHOWN], *([f"... and {more} more"] if more > 0 else [])]
    return "\n  ".join(lines)


def _empty(work: Path) -> None:
    # The manifest goes first: without it, what is left of the shards belongs to nobody.
    _work_manifest(work).unlink(missing_ok=True)
    for path in work.iterdir():
        if not path.name.startswith("lock"):
            path.unlink()


@contextlib.contextmanager
def _locked(work: Path, part: tuple[int, int] | None) -> Iterator[None]:
    """Two runs of one part would do the same work twice. The lock goes with its process."""
    name = "lock" if part is None else f"lock-{part[0]}-of-{part[1]}"
    with (work / name).open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is building in {work}; wait for it") from error
        except OSError:
            pass  # a file system without locks; temporary names keep two runs harmless
        yield
