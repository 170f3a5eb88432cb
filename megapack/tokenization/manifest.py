"""The plan of a build on disk: how a second run knows that it continues the first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megapack.errors import FormatError
from megapack.storage.atomic import atomic_write
from megapack.tokenization.pieces import InputFile

__all__ = ["describe_inputs", "differences", "read_manifest", "write_manifest"]

VERSION = 1


def describe_inputs(files: Sequence[InputFile]) -> list[list[Any]]:
    """[path, bytes, mtime in ns] of every file, in order."""
    return [[file.path, file.size, file.mtime_ns] for file in files]


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path, "w") as file:
        json.dump({"format": "megapack build", "version": VERSION, **content}, file, indent=1)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest at ``path``, None where there is none. Raises FormatError if it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FormatError(f"{path} is not valid JSON ({error}); start over with --overwrite") from (
            error
        )
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise FormatError(f"{path} is of another version; start over with --overwrite")
    return content


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed between two plans, one readable line each; empty when they agree."""
    lines = []
    for key in sorted(new):
        if key == "inputs":
            lines += _changed_inputs(old.get(key, []), new[key])
        elif isinstance(new[key], dict):
            before = old.get(key) or {}
            lines += [
                f"{key}: {name} was {before.get(name)!r}, is {value!r}"
                for name, value in new[key].items()
                if before.get(name) != value
            ]
        elif old.get(key) != new[key]:
            lines.append(f"{key} was {old.get(key)!r}, is {new[key]!r}")
    return lines


def _changed_inputs(old: Sequence[list[Any]], new: Sequence[list[Any]]) -> list[str]:
    before = {path: facts for path, *facts in old}
    after = {path: facts for path, *facts in new}
    lines = [f"input {path} is new" for path in after if path not in before]
    lines += [f"input {path} is gone" for path in before if path not in after]
    lines += [
        f"input {path} changed" for path in after if before.get(path, 0) not in (0, after[path])
    ]
    if not lines and list(before) != list(after):
        lines.append("the inputs come in another order")
    return lines
