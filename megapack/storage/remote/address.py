"""Addresses of objects: ``s3://``, ``gs://``, ``az://``, ``https://``, and files to be staged.

``file:///path`` names what plain ``/path`` names, but is read through the local cache: for disks
that are slow or shared by many nodes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from megapack.errors import ConfigError

__all__ = ["SCHEMES", "is_remote", "joined", "split"]

SCHEMES = ("s3", "gs", "az", "https", "http", "file")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path or prefix is an address instead of a name in the file system.

    Raises:
        ConfigError: it is one of a kind that is not read.
    """
    match = _SCHEME.match(os.fspath(path))
    if match is None:
        return False
    if match[1] not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"{os.fspath(path)}: addresses begin with one of {known}")
    return True


def joined(folder: Path, path: str) -> str:
    """A path as it is meant in a folder; an address is the same everywhere."""
    return path if is_remote(path) else str(folder / path)


def split(url: str) -> tuple[str, str]:
    """The address of the folder and the name in it. Raises ConfigError: there is no name."""
    folder, _, name = url.rpartition("/")
    if not name or folder.endswith(("/", ":")):
        raise ConfigError(f"{url} names no object; an address is like s3://bucket/folder/name")
    return folder, name
