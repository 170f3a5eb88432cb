"""Many datasets, each packed by itself, as one source: ``ShardedIndex``, and the shard manifest.

A source of many .bin/.idx pairs, its shards, is what their merge would be: documents are numbered
through the shards, and so are the samples of every bucket: those of the first shard, then those of
the second. So whatever speaks of samples and documents of a source (shuffle, cursors, blends, lists
of excluded documents, scores) does not know of shards, and every epoch has every sample once::

    load_shards("web.shards.json").runs  # of two shards with 2 and 3 samples in the only bucket
    # -> first numbers [0, 2, 5], shards [0, 1], numbers of the first there [0, 0]

All that a run must know before it draws the first sample stands in the manifest, one small JSON
file; a shard is opened when a sample of it is needed, and is then compared with what it says::

    {"format": "megapack shards", "version": 2, "strategy": "bucket", "parameters": {...},
     "buckets": [...], "seed": 0, "bucket_capacity": [...], "shards": [
      {"prefix": "web/000", "samples": "web.shards/000.samples", "num_documents": 81723, ...},
      ...
    ], "xxh3": "5e0b..."}

``xxh3`` is of all that stands before it, as ``json.dumps`` writes it (xxh3_64). A shard's fields
are those of ``PackedShard``; paths below the manifest's folder are relative to it, so that they
move along. A manifest on this machine may name whole paths and addresses as well; one that is read
from an address names what lies beside or below it and nothing else, since whoever wrote it shall
not choose what is read here. The file is written last, when all shards are packed: it is complete
or absent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.config import from_dict
from megapack.errors import ConfigError, FormatError, IndexMismatchError, redacted
from megapack.packing.file_format import Check, are_counts, find_wrong, is_count, is_text
from megapack.packing.sample_index import Arranged, SampleIndex, SourceIndex
from megapack.records import parse_json
from megapack.storage.address import is_below, is_remote, split_address
from megapack.storage.files import atomic_write, open_regular
from megapack.storage.index_file import LABELS, WEIGHTS
from megapack.storage.remote.copies import local_output_file
from megapack.storage.remote.reader import fetch_file

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PackedShard:
    """One dataset and its samples: a row of a shard manifest."""

    prefix: str
    """Path of the .bin/.idx pair, without the ending."""
    samples: str
    """Path of its .samples."""
    dtype: str
    num_documents: int
    num_tokens: int
    fingerprint: str
    """``IndexedDataset.fingerprint`` of the documents, compared whenever the shard is opened."""
    samples_fingerprint: str
    samples_per_bucket: tuple[int, ...]
    most_segments: tuple[int, ...]
    """Most segments of one sample, by bucket."""
    longest_segment: int
    """Tokens."""
    longest_reach: int
    """The largest begin + length of a segment, tokens of its document."""
    max_token_id: int | None
    """Largest id of tokens and labels; None: no meta file tells."""
    vocab_size: int | None
    document_end_token: int | None
    labels: bool
    """Whether ``<prefix>.labels`` belongs to it."""
    weights: str | None = None
    """``weights_identity`` of ``<prefix>.weights``, compared whenever the shard is opened; None:
    there are none."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Of the prefixes of its documents (""), and of what belongs to them."""
        beside = {LABELS: self.labels, WEIGHTS: self.weights is not None}
        return ("", *(end for end, is_there in beside.items() if is_there))


def place(path: str) -> str:
    """One spelling for every way to write a path; an address stays whole."""
    return path if is_remote(path) else os.path.abspath(path)  # noqa: PTH100 (links stay)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ShardedIndex:
    """The samples of a shard manifest.

    Attributes:
        path: of the shard manifest; its address, a str, where that is remote.
        shards: in their order; all of the manifest, or some that follow each other.
        strategy, parameters, buckets, seed: how each of them was packed.
        bucket_capacity: int64 (num_buckets,), tokens.
        arranged: the order in which its samples lie, if they lie in one.
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
            f"ShardedIndex({self.path}: {len(self.shards):,} shards, {self.num_samples:,} samples, "
            f"{self.num_documents:,} documents)"
        )

    # --- what a SampleIndex has ------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Identity of documents and samples of all shards, and how many there are."""
        text = "".join(f"{s.fingerprint}:{s.samples_fingerprint};" for s in self.shards)
        order = "" if self.arranged is None else ", arranged"
        return f"{xxhash.xxh3_128_hexdigest(text.encode())} of {len(self.shards)} shards{order}"

    @property
    def has_groups(self) -> bool:
        """Whether its shards know groups of documents; those of an arranged source do not."""
        return bool(self.parameters.get("groups")) and self.arranged is None

    @cached_property
    def bucket_sample_offsets(self) -> Ids:
        """int64 (num_buckets + 1,)."""
        return _offsets(self._counts.sum(axis=0))

    @property
    def alignment(self) -> int:
        return int(self.parameters.get("alignment", 1))

    @property
    def fim_room(self) -> int:
        return int(self.parameters.get("fim_room", 0))

    @property
    def num_samples(self) -> int:
        return int(self.bucket_sample_offsets[-1])

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    @cached_property
    def num_tokens(self) -> int:
        """Of the documents of all shards."""
        return sum(shard.num_tokens for shard in self.shards)

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
        """Read all samples of all shards. Raises FormatError, IndexMismatchError, OSError."""
        for number in range(len(self.shards)):
            self.open(number).verify()

    # --- shards ----------------------------------------------------------------------------------

    @cached_property
    def first_documents(self) -> Ids:
        """int64 (num_shards + 1,): the number of every shard's first document in the source."""
        return _offsets(np.array([shard.num_documents for shard in self.shards], np.int64))

    @cached_property
    def runs(self) -> tuple[Ids, Ids, Ids]:
        """Samples of the source that are consecutive samples of one shard, in their order.

        Returns:
            int64 (runs + 1,), their first numbers in the source, and how many samples it has;
            int64 (runs,), the shard of each; int64 (runs,), the number of the first one there.
        """
        counts = self._counts
        own = np.cumsum(counts, axis=1) - counts  # a shard's samples go on from bucket to bucket
        bucket, shard = np.nonzero(counts.T)  # bucket after bucket, in each shard after shard
        return _offsets(counts[shard, bucket]), shard, np.ascontiguousarray(own[shard, bucket])

    @property
    def open_shards(self) -> list[SampleIndex | None]:
        return [None] * len(self.shards)

    def open(self, number: int) -> SampleIndex:
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
        # Absolute: a worker may have another working directory.
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        here = (replace(s, prefix=place(s.prefix), samples=place(s.samples)) for s in self.shards)
        return {**state, "shards": tuple(here)}

    @cached_property
    def _counts(self) -> Ids:
        """(num_shards, num_buckets) samples."""
        return np.array([shard.samples_per_bucket for shard in self.shards], np.int64)


def _offsets(counts: Ids) -> Ids:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


SUFFIX = ".shards.json"
FORMAT = "megapack shards"
VERSION = 2
VERSION_OF_WEIGHTS = 3  # of a manifest some of whose shards have loss weights
# How shards are packed: the same for all of them.
PLAN = ("strategy", "parameters", "buckets", "seed", "bucket_capacity")


_CHECKS: dict[str, Check] = {
    "str": is_text,
    "int": is_count,
    "int | None": lambda value: value is None or type(value) is int,
    "str | None": lambda value: value is None or is_text(value),
    "tuple[int, ...]": are_counts,
    "bool": lambda value: type(value) is bool,
}
_FIELDS = {field.name: _CHECKS[str(field.type)] for field in fields(PackedShard)}
_PATHS = ("prefix", "samples")


def is_shard_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a shard manifest."""
    return os.fspath(path).endswith(SUFFIX)


def load_index(path: str | os.PathLike[str], shards: Sequence[int] | None = None) -> SourceIndex:
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
    content = parse_json(encoded, path, remedy="pack the shards again")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FormatError(f"{path} is no shard manifest of megapack")
    if content.get("version") not in (VERSION, VERSION_OF_WEIGHTS):
        raise FormatError(
            f"{path} has version {content.get('version')!r}; this megapack reads {VERSION} "
            f"and {VERSION_OF_WEIGHTS}: pack "
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
    how = {name: content[name] for name in PLAN}
    capacities = np.array(how.pop("bucket_capacity"), np.int64)
    found = (_shard(path, begin + i, rows[begin + i], len(capacities)) for i in range(end - begin))
    arranged = content.get("arranged")
    try:
        if arranged is not None:
            arranged = from_dict(Arranged, arranged, where=f"{path}: arranged")
    except ConfigError as error:
        raise FormatError(f"{path} is damaged: {error}") from error
    return ShardedIndex(
        path=path, arranged=arranged, shards=tuple(found), bucket_capacity=capacities, **how
    )


def manifest_path(path: str | os.PathLike[str]) -> Path | str:
    """A Path; of an address it is a str."""
    return os.fspath(path) if is_remote(path) else Path(path)


def _folder_of(path: Path | str) -> str:
    return split_address(path)[0] if isinstance(path, str) else str(path.parent)


def _shard(path: Path | str, number: int, row: Any, num_buckets: int) -> PackedShard:
    row = {"weights": None, **row} if isinstance(row, dict) else row
    wrong = find_wrong(row, _FIELDS)
    if wrong is not None:
        raise FormatError(f"{path} is damaged: shard {number} {wrong}")
    known = {name: row[name] for name in _FIELDS}
    for name in ("samples_per_bucket", "most_segments"):
        known[name] = tuple(row[name])
        if len(known[name]) != num_buckets:
            raise FormatError(
                f"{path} is damaged: shard {number} has {name} of {len(known[name])} buckets"
            )
    return PackedShard(**known | {name: _located(path, number, row[name]) for name in _PATHS})


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
    weighed = any(shard.weights for shard in shards)
    version = VERSION_OF_WEIGHTS if weighed else VERSION
    head = {"format": FORMAT, "version": version, **{name: plan[name] for name in PLAN}}
    if arranged is not None:
        head["arranged"] = vars(arranged)
    rows = []
    for shard in shards:
        where = {name: related(path, getattr(shard, name)) for name in _PATHS}
        row = {**vars(shard), **where}
        rows.append(row if weighed else {name: row[name] for name in row if name != "weights"})
    digest = _digest({**head, "shards": rows})
    with local_output_file(path) as local, atomic_write(local, "w") as file:
        file.write(json.dumps(head)[:-1] + ', "shards": [\n ')
        file.write(",\n ".join(map(json.dumps, rows)) + f'\n], "xxh3": "{digest}"}}\n')


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content).encode())
