"""``ShardedIndex``: several packed datasets (shards) as one source, listed in a shard manifest.

- ``SourceIndex``: the samples of a source, a ``SampleIndex`` or a ``ShardedIndex``.
- ``load_index``, ``load_shards``, ``save_shards``: open a source; read and write a manifest.

Documents are numbered across the shards, and so are the samples of every bucket, as if the shards
were merged. So shuffles, blends, exclusion lists and scores need no knowledge of shards::

    load_shards("web.shards.json").runs  # two shards with 2 and 3 samples in the only bucket
    # -> first samples [0, 2, 5], shards [0, 1], first samples within the shards [0, 0]

The manifest is one small JSON file with everything that a run needs before it draws the first
sample. A shard is opened, and compared with the manifest, when one of its samples is needed::

    {"format": "megapack shards", "version": 4, "strategy": "bucket", "parameters": {...},
     "buckets": [...], "seed": 0, "bucket_capacity": [...], "shards": [
      {"prefix": "web/000", "samples": "web.shards/000.samples", "num_documents": 81723, ...},
      ...
    ], "xxh3": "5e0b..."}

``xxh3`` is xxh3_64 of all earlier fields as ``json.dumps`` writes them. A shard's fields are those
of ``PackedShard``. Paths below the manifest's folder are relative, so the folder can be moved. A
local manifest may also have absolute paths and addresses; a remote one may not, so that it cannot
make this machine read other files. The manifest is written last: it is complete or absent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.config import from_dict, to_dict
from megapack.errors import ConfigError, FormatError, IndexMismatchError, redacted
from megapack.packing.file_format import Check, are_counts, find_wrong, is_count, is_text
from megapack.packing.sample_index import SampleIndex, WithRoom
from megapack.records import parse_json
from megapack.storage.address import is_below, is_remote, split_address
from megapack.storage.columns import ColumnSpec, check_column
from megapack.storage.files import atomic_write, open_regular
from megapack.storage.remote.copies import local_output_file
from megapack.storage.remote.reader import fetch_file
from megapack.units import counted

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PackedColumn:
    spec: ColumnSpec
    identity: str  # ColumnEntry.identity, compared when the shard is opened


@dataclass(frozen=True, kw_only=True)
class PackedShard:
    """Row of a shard manifest: one dataset and its samples."""

    prefix: str  # path of the .bin/.idx pair, without the suffix
    samples: str  # path of the .samples file
    dtype: str
    num_documents: int
    num_tokens: int
    fingerprint: str  # IndexedDataset.fingerprint, compared when the shard is opened
    samples_fingerprint: str
    samples_per_bucket: tuple[int, ...]
    most_segments: tuple[int, ...]  # of one sample, by bucket; 0 for a bucket without samples
    longest_segment: int  # tokens; 0 without samples
    longest_reach: int  # largest begin + length of a segment
    max_token_id: int | None  # of tokens and labels; None: a meta file is missing
    vocab_size: int | None
    document_end_token: int | None
    document_begin_token: int | None
    columns: Mapping[str, PackedColumn]  # by name

    def document_token(self, fact: str) -> int | str | None:
        """Return the token of ``fact`` (``BOUNDARY_TOKENS``); "unknown" without a meta file."""
        token: int | None = getattr(self, fact)
        return "unknown" if token is None and self.max_token_id is None else token


def place(path: str) -> str:
    """Return an absolute path, the same for all spellings; an address is unchanged."""
    return path if is_remote(path) else os.path.abspath(path)  # noqa: PTH100 (keeps links)


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """The order in which ``megapack-build arrange`` wrote the samples of a source."""

    source: str  # fingerprint of the source that was arranged
    seed: int
    block_tokens: int
    window_blocks: int


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShardedIndex(WithRoom):
    """Samples of a shard manifest.

    Attributes:
        path: path of the manifest, or its address, a str.
        shards: all shards of the manifest, or consecutive ones.
        strategy, parameters, buckets, seed: options of ``pack`` for each shard.
        bucket_capacity: int64 (num_buckets,), tokens.
        arranged: the order in which the samples were written, if they were arranged.
    """

    path: Path | str
    shards: tuple[PackedShard, ...]
    strategy: str
    parameters: Mapping[str, Any]
    buckets: Sequence[int]
    seed: int
    bucket_capacity: NDArray[np.int64]
    arranged: Arranged | None = None

    def __repr__(self) -> str:
        return (
            f"ShardedIndex({self.path}: {counted(len(self.shards), 'shard')}, "
            f"{counted(self.num_samples, 'sample')}, {counted(self.num_documents, 'document')})"
        )

    # --- attributes of a SampleIndex -------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of the documents and samples of all shards, and the number of shards."""
        text = "".join(f"{s.fingerprint}:{s.samples_fingerprint};" for s in self.shards)
        order = "" if self.arranged is None else ", arranged"
        return f"{xxhash.xxh3_128_hexdigest(text.encode())} of {len(self.shards)} shards{order}"

    @property
    def has_groups(self) -> bool:
        return bool(self.parameters.get("groups")) and self.arranged is None

    @cached_property
    def bucket_sample_offsets(self) -> Ids:
        """First sample of every bucket, then the number of samples, (num_buckets + 1,)."""
        return _offsets(self._counts.sum(axis=0))

    @property
    def has_trees(self) -> bool:
        """The segments of the shards are nodes of prefix trees."""
        return self.strategy == "tree"

    @property
    def num_samples(self) -> int:
        return int(self.bucket_sample_offsets[-1])

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    @cached_property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @cached_property
    def columns(self) -> dict[str, ColumnSpec]:
        """Columns that some shard has, in alphabetical order. Raises ConfigError if two shards have
        different columns of one name."""
        first: dict[str, tuple[ColumnSpec, str]] = {}
        for shard in self.shards:
            for name, column in shard.columns.items():
                spec, prefix = first.setdefault(name, (column.spec, shard.prefix))
                if column.spec != spec:
                    raise ConfigError(
                        f"{self.path}: column {name} of {shard.prefix} is {column.spec}, and that "
                        f"of {prefix} is {spec}: write it again with the same type"
                    )
        return {name: first[name][0] for name in sorted(first)}

    @property
    def most_segments(self) -> list[int]:
        return [max(most) for most in zip(*(s.most_segments for s in self.shards), strict=True)]

    @property
    def longest_segment(self) -> int:
        return max(shard.longest_segment for shard in self.shards)

    @property
    def longest_reach(self) -> int:
        return max(shard.longest_reach for shard in self.shards)

    def verify(self) -> None:
        """Compare all checksums of all shards. Raises FormatError, IndexMismatchError, OSError."""
        for number in range(len(self.shards)):
            self.open(number).verify()

    # --- shards ----------------------------------------------------------------------------------

    @cached_property
    def first_documents(self) -> Ids:
        """First document of every shard, then the number of documents, (num_shards + 1,)."""
        return _offsets(np.array([shard.num_documents for shard in self.shards], np.int64))

    @cached_property
    def runs(self) -> tuple[Ids, Ids, Ids]:
        """Runs of samples of the source that are consecutive samples of one shard: int64 (runs +
        1,), the first sample of each run in the source, then the number of samples; int64 (runs,),
        the shard of each run; and int64 (runs,), the first sample of the run in its shard."""
        counts = self._counts
        first = np.cumsum(counts, axis=1) - counts  # number in the shard, by shard and bucket
        bucket, shard = np.nonzero(counts.T)  # by bucket, then by shard
        return _offsets(counts[shard, bucket]), shard, np.ascontiguousarray(first[shard, bucket])

    @property
    def open_shards(self) -> list[SampleIndex | None]:
        """Samples of every shard; None: ``open`` maps them."""
        return [None] * len(self.shards)

    def open(self, number: int) -> SampleIndex:
        """Return the samples of one shard, memory-mapped. Raises IndexMismatchError if the manifest
        lists other samples, FormatError, OSError."""
        shard = self.shards[number]
        index = SampleIndex.load(shard.samples)
        counts = tuple(np.diff(index.bucket_sample_offsets).tolist())
        if (index.fingerprint, counts) != (shard.samples_fingerprint, shard.samples_per_bucket):
            raise IndexMismatchError(
                f"{shard.samples} holds other samples than {self.path} says: it was packed again; "
                "restore it, or pack all shards again with --overwrite"
            )
        return index

    def __getstate__(self) -> dict[str, Any]:
        # Absolute paths: a worker may have another working directory.
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        shards = (replace(s, prefix=place(s.prefix), samples=place(s.samples)) for s in self.shards)
        return {**state, "shards": tuple(shards)}

    @cached_property
    def _counts(self) -> Ids:
        """Samples by shard and bucket, (num_shards, num_buckets)."""
        return np.array([shard.samples_per_bucket for shard in self.shards], np.int64)


SourceIndex: TypeAlias = SampleIndex | ShardedIndex


def _offsets(counts: Ids) -> Ids:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


SUFFIX = ".shards.json"
FORMAT = "megapack shards"
VERSION = 4
PLAN = ("strategy", "parameters", "buckets", "seed", "bucket_capacity")  # the same for all shards

_CHECKS: dict[str, Check] = {
    "str": is_text,
    "int": is_count,
    "int | None": lambda value: value is None or type(value) is int,
    "str | None": lambda value: value is None or is_text(value),
    "tuple[int, ...]": are_counts,
    "Mapping[str, PackedColumn]": lambda value: isinstance(value, dict),
}
_FIELDS = {f.name: _CHECKS[str(f.type)] for f in fields(PackedShard)}
_PATHS = ("prefix", "samples")


def is_shard_manifest(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).endswith(SUFFIX)


def load_index(path: str | os.PathLike[str], shards: Sequence[int] | None = None) -> SourceIndex:
    """Open a .samples file or a shard manifest; see ``SampleIndex.load`` and ``load_shards``."""
    if is_shard_manifest(path):
        return load_shards(path, shards)
    if shards is not None:
        raise ConfigError(f"{os.fspath(path)} is not a shard manifest; leave out shards")
    return SampleIndex.load(path)


def load_shards(path: str | os.PathLike[str], shards: Sequence[int] | None = None) -> ShardedIndex:
    """Read a shard manifest (or its shards [begin, end)), without opening the shards. Raises
    FormatError if the file is damaged, of another version or another format, ConfigError if
    ``shards`` exceeds the manifest, and OSError if the file cannot be read."""
    path = manifest_path(path)
    with open_regular(fetch_file(path) if isinstance(path, str) else path) as file:
        encoded = file.readall()
    content = parse_json(encoded, path, remedy="pack the shards again")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FormatError(f"{path} is not a shard manifest of megapack")
    if content.get("version") != VERSION:
        raise FormatError(
            f"{path} has version {content.get('version')!r}; this megapack reads {VERSION}: pack "
            "again, "
            f"megapack-build pack PREFIX ... --output {path} --overwrite"
        )
    if content.pop("xxh3", None) != _digest(content):
        raise FormatError(
            f"{path} is damaged or was edited: its checksum is wrong; restore it, or pack again"
        )
    rows = content.get("shards")
    if not isinstance(rows, list) or not rows or any(name not in content for name in PLAN):
        raise FormatError(f"{path} is damaged: it has no shards or no packing options")
    begin, end = shards or (0, len(rows))
    if not 0 <= begin < end <= len(rows):
        raise ConfigError(
            f"shards is [{begin}, {end}); {path} has {len(rows)} shards: choose a range of them"
        )
    options = {name: content[name] for name in PLAN}
    capacities = np.array(options.pop("bucket_capacity"), np.int64)
    chosen = tuple(_shard(path, i, rows[i], len(capacities)) for i in range(begin, end))
    arranged = content.get("arranged")
    try:
        if arranged is not None:
            arranged = from_dict(Arranged, arranged, where=f"{path}: arranged")
    except ConfigError as error:
        raise FormatError(f"{path} is damaged: {error}") from error
    return ShardedIndex(
        path=path, arranged=arranged, shards=chosen, bucket_capacity=capacities, **options
    )


def manifest_path(path: str | os.PathLike[str]) -> Path | str:
    return os.fspath(path) if is_remote(path) else Path(path)


def _folder_of(path: Path | str) -> str:
    return split_address(path)[0] if isinstance(path, str) else str(path.parent)


def _shard(path: Path | str, number: int, row: Any, num_buckets: int) -> PackedShard:
    wrong = find_wrong(row, _FIELDS)
    if wrong is not None:
        raise FormatError(f"{path} is damaged: shard {number} {wrong}")
    values = {name: row[name] for name in _FIELDS}
    columns: dict[str, PackedColumn] = {}
    for name in ("samples_per_bucket", "most_segments"):
        values[name] = tuple(row[name])
        if len(values[name]) != num_buckets:
            raise FormatError(
                f"{path} is damaged: shard {number} has {len(values[name])} of {num_buckets} {name}"
            )
    try:
        for name, content in row["columns"].items():
            columns[name] = from_dict(PackedColumn, content, where=f"column {name}")
            check_column(name, columns[name].spec)
    except ConfigError as error:
        raise FormatError(f"{path} is damaged: shard {number}: {error}") from error
    paths = {name: _resolve(path, number, row[name]) for name in _PATHS}
    return PackedShard(**values | paths | {"columns": columns})


def _resolve(manifest: Path | str, number: int, text: str) -> str:
    """Return the path or address of a manifest's entry, relative to the working directory. Raises
    FormatError if the manifest may not refer to it."""
    folder = _folder_of(manifest)
    try:
        is_address = is_remote(text)
    except ConfigError as error:
        raise FormatError(f"{manifest} is damaged: shard {number}: {error}") from error
    if isinstance(manifest, str):
        path = text if is_address else f"{folder}/{text}"
        allowed = is_below(folder, path)
    else:
        path = text if is_address else os.path.normpath(os.path.join(folder, text))  # noqa: PTH118 (fast)
        allowed = is_address or text.startswith("/") or ".." not in text.split("/")
    if not allowed:
        raise FormatError(
            f"{manifest}: shard {number} refers to {redacted(text)}, which is not below {folder}; "
            "a manifest may only refer to files below its folder (a local one also to absolute "
            "paths and addresses): pack the datasets again where they are"
        )
    return path


def related(manifest: Path | str, path: str) -> str:
    """Return a path as the manifest records it: relative if below its folder, else absolute."""
    return place(path).removeprefix(place(_folder_of(manifest)) + os.sep)


def plain(value: Any) -> Any:
    """Return a value of ``PLAN`` as JSON."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def save_shards(
    path: str | os.PathLike[str],
    plan: Mapping[str, Any],
    shards: Sequence[PackedShard],
    *,
    arranged: Arranged | None = None,
) -> None:
    """Write or replace a shard manifest, a file or an object at an address. ``plan`` has the keys
    ``PLAN``; paths of ``shards`` are relative to the working directory."""
    path = manifest_path(path)
    head = {"format": FORMAT, "version": VERSION, **{name: plan[name] for name in PLAN}}
    if arranged is not None:
        head["arranged"] = vars(arranged)
    rows = [
        {**to_dict(shard), **{name: related(path, getattr(shard, name)) for name in _PATHS}}
        for shard in shards
    ]
    digest = _digest({**head, "shards": rows})
    with local_output_file(path) as local, atomic_write(local, "w") as file:
        file.write(json.dumps(head)[:-1] + ', "shards": [\n ')
        file.write(",\n ".join(map(json.dumps, rows)) + f'\n], "xxh3": "{digest}"}}\n')


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content).encode())
