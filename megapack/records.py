"""JSON records on disk, read with one set of checks and messages.

A record is a frozen keyword-only dataclass with typed fields. ``read_record`` checks the JSON, the
version (a field such as ``version: Literal[1] = 1``), unknown and missing keys, and the type of
every value, including nested ones; ``check_inside`` checks relative file names.

    read_record(Manifest, Path("manifest.json"), remedy="restore it from a copy")
    # {"step": "seven"} -> FormatError: manifest.json: step is 'seven'; it must be of type int;
    #                      restore it from a copy
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from megapack.config import from_dict
from megapack.errors import ConfigError, FormatError, MegapackError

T = TypeVar("T")


def parse_json(
    text: str | bytes,
    where: object,
    *,
    remedy: str | Callable[[], str],
    error: type[MegapackError] = FormatError,
) -> Any:
    """Return the content of a JSON text (bytes are UTF-8). Raises ``error`` if it is not valid JSON
    or nested too deeply. The message begins with ``where``, the origin of the text, and ends with
    ``remedy``, a text or a function that returns it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        advice = remedy if isinstance(remedy, str) else remedy()
        raise error(f"{where} is not valid JSON ({problem}); {advice}") from problem


def read_record(
    cls: type[T], path: Path, *, remedy: str, error: type[MegapackError] = FormatError
) -> T:
    """Read a JSON file as ``cls``; arguments as in ``parse_json``. Raises ``error`` for damaged
    JSON, a wrong version, unknown or missing keys, or a wrong type, and OSError."""
    content = parse_json(path.read_bytes(), path, remedy=remedy, error=error)
    try:
        return from_dict(cls, content, where=str(path))
    except ConfigError as problem:
        raise error(f"{problem}; {remedy}") from problem


def check_inside(where: str, name: str) -> None:
    """Raise ValueError for a file name that leaves its folder: absolute, with ``..``, or empty."""
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\\" in name or "\0" in name:
        raise ValueError(f"{where} is {name!r}; it must be a relative path inside its folder")
