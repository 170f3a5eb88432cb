"""Addresses of objects: ``s3://``, ``gs://``, ``az://``, ``https://``, and files to be staged.

``file:///path`` names what plain ``/path`` names, but is read through the local cache: for disks
that are slow or shared by many nodes. An address is a folder and a name and nothing else: whoever
asks whether a text is an address (``is_remote``) has it refused with a password or a query in it,
so that neither is ever stored or printed::

    s3://bucket/folder/corpus                 yes
    https://user:password@host/corpus         no: credentials are settings of the environment
    https://host/corpus?X-Amz-Signature=...   no: a signed URL is of one object, a dataset has four
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

from megapack.errors import ConfigError, redacted

SCHEMES = ("s3", "gs", "az", "https", "http", "file")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(rf"({'|'.join(SCHEMES)}):/")
_GUIDE = "docs/guides/object_storage.md"


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path or prefix is an address instead of a name in the file system.

    Raises:
        ConfigError: it is one of a kind that is not read, or holds credentials or a query.
    """
    text = os.fspath(path)
    match = _SCHEME.match(text)
    if match is None:
        if _ONE_SLASH.match(text):
            shown = redacted(_ONE_SLASH.sub(r"\1://", text, count=1))
            raise ConfigError(
                f"{shown} was given with one slash, as pathlib.Path leaves it: give it as text"
            )
        return False
    if match[1] not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ConfigError(f"{redacted(text)}: addresses begin with one of {known}")
    if "@" in re.split("[/?#]", text)[2]:
        raise ConfigError(
            f"{redacted(text)}: an address holds no user and no password, since addresses are "
            f"stored and printed; set credentials in environment variables ({_GUIDE})"
        )
    if "?" in text or "#" in text:
        raise ConfigError(
            f"{redacted(text)}: an address has no query ('?') and no fragment ('#'): a signed URL "
            "is of one object, and a dataset has several. Set credentials in environment "
            f"variables, as AZURE_STORAGE_SAS_TOKEN ({_GUIDE}); in a pattern write * instead of ?"
        )
    return True


def path_in(folder: Path, path: str) -> str:
    """A path as it is meant in a folder; an address is the same everywhere."""
    return path if is_remote(path) else str(folder / path)


def is_below(folder: str, url: str) -> bool:
    """Whether an address names what lies in a folder at an address or below, however written."""
    names = [unquote(name) for name in url.removeprefix(f"{folder}/").split("/")]
    plain = not any(name in ("", ".", "..") or set("/\\") & set(name) for name in names)
    return url.startswith(f"{folder}/") and plain


def split_address(url: str) -> tuple[str, str]:
    """The address of the folder and the name in it. Raises ConfigError: there is no name."""
    folder, _, name = url.rpartition("/")
    if not name or folder.endswith(("/", ":")):
        raise ConfigError(f"{url} names no object; an address is like s3://bucket/folder/name")
    return folder, name
