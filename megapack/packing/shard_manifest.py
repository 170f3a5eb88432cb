"""The shard manifest: one small JSON file that says of every shard of a source what a run must know
before it opens any of them.

    {"format": "megapack shards", "version": 2, "strategy": "bucket", "parameters": {...},
     "buckets": [...], "seed": 0, "bucket_capacity": [...], "shards": [
      {"prefix": "web/000", "samples": "web.shards/000.samples", "num_documents": 81723, ...},
      ...
    ], "xxh3": "5e0b..."}

``xxh3`` is of all that stands before it, as ``json.dumps`` writes it (xxh3_64).

A shard's fields are those of ``PackedShard``; paths below the manifest's folder are relative to it,
so that they move along. A manifest on this machine may name whole paths and addresses as well; one
that is read from an address names what lies beside or below it and nothing else, since whoever
wrote it shall not choose what is read here. The file is written last, when all shards are packed:
it is complete or absent.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megapack.config import from_dict
from megapack.errors import ConfigError, FormatError
from megapack.packing.index import SampleIndex
from megapack.packing.shards import Arranged, PackedShard, ShardedIndex, place
from megapack.storage.atomic import atomic_write
from megapack.storage.opening import open_regular
from megapack.storage.remote import is_remote
from megapack.storage.remote.address import is_below, redacted, split
from megapack.storage.remote.copies import local_output_file
from megapack.storage.remote.opening import fetch_file

__all__ = [
    "PLAN",
    "SUFFIX",
    "is_shard_manifest",
    "load_index",
    "load_shards",
    "manifest_path",
    "related",
    "save_shards",
]

SUFFIX = ".shards.json"
FORMAT = "megapack shards"
VERSION = 2
# How shards are packed: the same for all of them.
PLAN = ("strategy", "parameters", "buckets", "seed", "bucket_capacity")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # not bool


def _is_known(value: Any) -> bool:
    return value is None or type(value) is int


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "str": _is_text,
    "int": _is_count,
    "int | None": _is_known,
    "tuple[int, ...]": _are_counts,
    "bool": lambda value: type(value) is bool,
}
_FIELDS = {field.name: _CHECKS[str(field.type)] for field in dataclasses.fields(PackedShard)}
_PATHS = ("prefix", "samples")


def is_shard_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a shard manifest."""
    return os.fspath(path).endswith(SUFFIX)


def load_index(
    path: str | os.PathLike[str], shards: Sequence[int] | None = None
) -> SampleIndex | ShardedIndex:
    """The samples of a source: a .samples file, or a shard manifest; ``shards`` as in
    ``load_shards``. Raises as ``SampleIndex.load`` and ``load_shards`` do."""
    if is_shard_manifest(path):
        return load_shards(path, shards)
    if shards is not None:
        raise ConfigError(f"{os.fspath(path)} is no shard manifest; leave out shards")
    return SampleIndex.load(path)


def load_shards(path: str | os.PathLike[str], shards: Sequence[int] | None = None) -> ShardedIndex:
    """Read a shard manifest; no file of a shard is opened.

    Args:
        path: of the manifest, or its address.
        shards: take those from the first of these numbers up to the second; None: all.

    Raises:
        FormatError: it is no shard manifest, of another version, or damaged.
        ConfigError: it has not so many shards.
        OSError: it cannot be read.
    """
    path = manifest_path(path)
    with open_regular(fetch_file(path) if isinstance(path, str) else path) as file:
        encoded = file.readall()
    try:
        content = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no valid JSON ({error}); pack the shards again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FormatError(f"{path} is no shard manifest of megapack")
    if content.get("version") != VERSION:
        raise FormatError(
            f"{path} has version {content.get('version')!r}; this megapack reads {VERSION}: pack "
            f"again, megapack-build pack PREFIX ... --output {path} --overwrite"
        )
    if content.pop("xxh3", None) != _digest(content):
        raise FormatError(
            f"{path} is damaged, or was edited: it does not have its checksum; restore it, or pack "
            "the datasets again"
        )
    rows = content.get("shards")
    if not isinstance(rows, list) or not rows or any(name not in content for name in PLAN):
        raise FormatError(f"{path} is damaged: it lacks shards or how they were packed")
    begin, end = shards or (0, len(rows))
    if not 0 <= begin < end <= len(rows):
        raise ConfigError(f"shards [{begin}, {end}) of {path}, which has {len(rows)}")
    num_buckets = len(content["bucket_capacity"])
    found = [
        _shard(path, number, row, num_buckets) for number, row in enumerate(rows[begin:end], begin)
    ]
    return ShardedIndex(
        path=path,
        arranged=_arranged(path, content.get("arranged")),
        shards=tuple(found),
        bucket_capacity=np.array(content["bucket_capacity"], np.int64),
        **{name: content[name] for name in ("strategy", "parameters", "buckets", "seed")},
    )


def manifest_path(path: str | os.PathLike[str]) -> Path | str:
    """A Path; of an address it is a str."""
    return os.fspath(path) if is_remote(path) else Path(path)


def _folder_of(path: Path | str) -> str:
    return split(path)[0] if isinstance(path, str) else str(path.parent)


def _arranged(path: Path | str, value: Any) -> Arranged | None:
    if value is None:
        return None
    try:
        return from_dict(Arranged, value, where=f"{path}: arranged")
    except ConfigError as error:
        raise FormatError(f"{path} is damaged: {error}") from error


def _shard(path: Path | str, number: int, row: Any, num_buckets: int) -> PackedShard:
    values = row if isinstance(row, dict) else {}
    for name, check in _FIELDS.items():
        if not check(values.get(name, ...)):
            raise FormatError(
                f"{path} is damaged: shard {number} says {name} is {values.get(name)!r}"
            )
    counts = tuple(values["samples_per_bucket"])
    most = tuple(values["most_segments"])
    if len(counts) != num_buckets or len(most) != num_buckets:
        raise FormatError(f"{path} is damaged: shard {number} has counts of {len(counts)} buckets")
    where = {name: _located(path, number, values[name]) for name in _PATHS}
    known = {name: values[name] for name in _FIELDS}
    return PackedShard(**{**known, **where, "samples_per_bucket": counts, "most_segments": most})


def _located(manifest: Path | str, number: int, text: str) -> str:
    """A path of a manifest, from here. Raises FormatError: it leads where it may not."""
    folder = _folder_of(manifest)
    try:
        whole = is_remote(text)
    except ConfigError as error:
        raise FormatError(f"{manifest} is damaged: shard {number}: {error}") from error
    if isinstance(manifest, str):
        found = text if whole else f"{folder}/{text}"
        inside = is_below(folder, found)
    else:
        found = text if whole else os.path.normpath(os.path.join(folder, text))  # noqa: PTH118 (fast)
        inside = whole or text.startswith("/") or ".." not in text.split("/")
    if not inside:
        raise FormatError(
            f"{manifest}: shard {number} names {redacted(text)}, which is not below {folder}: what "
            "a manifest names lies beside or below it (on this machine it may be named by a whole "
            "path or an address); pack the datasets again where they are"
        )
    return found


def related(manifest: Path | str, path: str) -> str:
    """As the manifest has a path, however it was written: relative below its folder, else whole."""
    whole, folder = place(path), place(_folder_of(manifest))
    return whole.removeprefix(folder + os.sep)


def plain(value: Any) -> Any:
    """A value of ``PLAN`` as JSON has it."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def save_shards(
    path: str | os.PathLike[str],
    plan: Mapping[str, Any],
    shards: Sequence[PackedShard],
    *,
    arranged: Arranged | None = None,
) -> None:
    """Write a shard manifest.

    Args:
        path: replaced if it is there; an address, too.
        plan: how all shards were packed; ``PLAN`` lists its fields.
        shards: with paths from here.
        arranged: the order in which they lie, if in one.

    Raises:
        OSError: it cannot be written.
    """
    path = manifest_path(path)
    head = {"format": FORMAT, "version": VERSION, **{name: plan[name] for name in PLAN}}
    if arranged is not None:
        head["arranged"] = vars(arranged)
    rows = []
    for shard in shards:
        where = {name: related(path, getattr(shard, name)) for name in _PATHS}
        rows.append({**vars(shard), **where})
    digest = _digest({**head, "shards": rows})
    with local_output_file(path) as local, atomic_write(local, "w") as file:
        file.write(json.dumps(head)[:-1] + ', "shards": [\n ')
        file.write(",\n ".join(map(json.dumps, rows)) + f'\n], "xxh3": "{digest}"}}\n')


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content).encode())
