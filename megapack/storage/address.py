"""Addresses of objects: ``s3://``, ``gs://``, ``az://``, ``https://``, and files to copy into the
cache.

``file:///path`` is the file ``/path``, read through the local cache; use it for slow or shared
disks. ``is_remote`` rejects addresses with a password or a query, so megapack never stores or
prints secrets::

    s3://bucket/folder/corpus                 yes
    https://user:password@host/corpus         no: set credentials in environment variables
    https://host/corpus?X-Amz-Signature=...   no: a URL is signed for one object, a dataset has four
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from megapack.errors import ConfigError, check_name, redacted

SCHEMES = ("s3", "gs", "az", "https", "http", "file")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(rf"({'|'.join(SCHEMES)}):/")
_UNUSUAL = re.compile(r"//|(^|/)\.(/|$)|/$|^$")
_GUIDE = "docs/guides/object_storage.md"


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path or prefix is an address, not a name in the file system. Raises
    ConfigError for an unsupported scheme, credentials, a query or NUL."""
    text = os.fspath(path)
    if "\0" in text:
        check_name(text)
    if ":/" not in text:  # most paths
        return False
    match = _SCHEME.match(text)
    if match is None:
        if _ONE_SLASH.match(text):
            shown = redacted(_ONE_SLASH.sub(r"\1://", text, count=1))
            raise ConfigError(
                f"{shown} was given with one slash after the colon, as pathlib.Path writes it: "
                "pass the address as a string"
            )
        return False
    if match[1] not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"{redacted(text)} is not supported; addresses begin with one of {known}")
    if "@" in re.split("[/?#]", text)[2]:
        raise ConfigError(
            f"{redacted(text)} contains a user or a password; addresses are stored and printed: "
            f"set credentials in environment variables ({_GUIDE})"
        )
    if "?" in text or "#" in text:
        raise ConfigError(
            f"{redacted(text)} has a query ('?') or a fragment ('#'); a URL is signed for one "
            "object, and a dataset has several: set credentials in environment variables such as "
            f"AZURE_STORAGE_SAS_TOKEN ({_GUIDE}); in a pattern write * instead of ?"
        )
    return True


def is_normal(path: str) -> bool:
    """Return whether ``str(Path(path))`` is the same path, without the time that this takes."""
    return _UNUSUAL.search(path) is None


def path_in(folder: Path, path: str) -> str:
    """Return a path relative to a folder; an address is returned unchanged."""
    if is_remote(path) or (path.startswith("/") and is_normal(path)):
        return path
    return str(folder / path)


def is_below(folder: str, url: str) -> bool:
    """Return whether ``url`` is inside ``folder``, an address; names may be percent-encoded."""
    names = [unquote(name) for name in url.removeprefix(f"{folder}/").split("/")]
    plain = not any(name in ("", ".", "..") or set("/\\") & set(name) for name in names)
    return url.startswith(f"{folder}/") and plain


def split_address(url: str) -> tuple[str, str]:
    """Return folder and name of an address. Raises ConfigError if one of them is empty."""
    folder, _, name = url.rpartition("/")
    if not name or folder.endswith(("/", ":")):
        raise ConfigError(f"{url} is not the address of an object; write s3://bucket/folder/name")
    return folder, name
