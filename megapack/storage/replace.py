"""What may stand under a name before a file of ours takes it: one rule for everything written."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from megapack.errors import ConfigError

__all__ = ["TEMPORARY_BYTES", "check_target", "target_of"]

TEMPORARY_BYTES = len(".tmp-01234567")  # what a temporary name adds to the final one

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link that leads in a circle",
}


def check_target(
    path: str | os.PathLike[str],
    *,
    overwrite: bool,
    difference: str | Callable[[], str | None] | None,
    name: str | None = None,
) -> bool:
    """Whether a file is to be written; asked before any work.

    Args:
        path: the final name. A link stays; the file it leads to is meant.
        overwrite: replace a file that differs.
        difference: from what would be written, a sentence; None: there is none. A callable is
            asked only when a file stands there.
        name: what to call it, if it is a copy of what stands elsewhere.

    Returns:
        True: nothing stands there, or it is to be replaced; False: the same stands there already.

    Raises:
        ConfigError: another file stands there and ``overwrite`` is False; what stands there is no
            regular file; its directory does not exist; the name is too long.
    """
    if not target_of(path).exists():
        return True
    if callable(difference):
        difference = difference()
    if difference is None:
        return False
    if not overwrite:
        raise ConfigError(
            f"{name or os.fspath(path)} is there already: {difference}. Replace it with "
            "--overwrite (overwrite=True), or choose another name"
        )
    return True


def target_of(path: str | os.PathLike[str]) -> Path:
    """The regular file, there or not, that writing to ``path`` replaces: links are followed.

    Raises:
        ConfigError: something else stands there (a device, a FIFO, a directory, ...), its
            directory does not exist, or there is no room for a temporary name.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise ConfigError(f"{os.fspath(path)}: there is no directory {target.parent}; create it")
    limit = _longest_name(target.parent) - TEMPORARY_BYTES
    num_bytes = len(os.fsencode(target.name))
    if num_bytes > limit:
        raise ConfigError(
            f"the name {target.name} has {num_bytes} bytes; at most {limit} leave room for a "
            "temporary name: choose a shorter one"
        )
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return target
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise ConfigError(
            f"{os.fspath(path)} is {kind}; only regular files are replaced: choose another name"
        )
    return target


def _longest_name(directory: Path) -> int:
    """In bytes."""
    try:
        return os.pathconf(directory, "PC_NAME_MAX")
    except (OSError, ValueError):
        return 255
