"""The record of a finished shard, and whether its files are still what it says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from megapack.storage.atomic import AtomicFile, publish
from megapack.storage.meta import bin_checksums, read_meta
from megapack.storage.mmididx import path_of
from megapack.tokenization.corpus.faults import BENIGN, Faults, Place, fault_lines

__all__ = [
    "LABELS",
    "ShardRecord",
    "Totals",
    "read_record",
    "record_path",
    "shard_prefix",
    "write_record",
]

LABELS = ".labels"  # ends the prefix of a dataset of labels


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """Counts of a shard. Written last, so where it stands the shard was complete."""

    plan: str  # digest
    index: int
    num_documents: int
    num_tokens: int
    num_text_bytes: int
    fault_counts: dict[str, int]
    fault_places: dict[str, list[Place]]
    kept: bool = False  # found finished by this run; not on disk

    @property
    def lacks_documents(self) -> bool:
        """Whether some were left out that only ``--on-error skip`` leaves out."""
        return not BENIGN.issuperset(self.fault_counts)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over many shards, JSON-able."""

    num_documents: int
    num_tokens: int
    num_text_bytes: int
    skipped: dict[str, int]  # by kind
    skipped_at: dict[str, list[str]]  # the first places of each kind

    @property
    def lacks_documents(self) -> bool:
        """As ``ShardRecord.lacks_documents``."""
        return not BENIGN.issuperset(self.skipped)

    @staticmethod
    def of_records(records: Sequence[ShardRecord]) -> Totals:
        faults = Faults("skip")
        for record in records:
            faults.add(record.fault_counts, record.fault_places)
        return Totals(
            num_documents=sum(record.num_documents for record in records),
            num_tokens=sum(record.num_tokens for record in records),
            num_text_bytes=sum(record.num_text_bytes for record in records),
            skipped=faults.counts,
            skipped_at={kind: [str(p) for p in found] for kind, found in faults.places.items()},
        )

    @staticmethod
    def of_manifest(content: Mapping[str, Any]) -> Totals:
        return Totals(**{f.name: content[f.name] for f in fields(Totals)})

    @property
    def num_skipped(self) -> int:
        return sum(self.skipped.values())

    def fault_lines(self) -> list[str]:
        return fault_lines(self.skipped, self.skipped_at)


def shard_prefix(directory: str, index: int) -> str:
    """Where a shard's datasets lie; their names go on with the stream and ``LABELS``."""
    return str(Path(directory) / f"shard-{index:06d}")


def write_record(prefix: str, record: ShardRecord) -> None:
    tree = asdict(record)
    del tree["kept"]
    tree["fault_places"] = {
        kind: [[place.path, place.unit, place.position] for place in places]
        for kind, places in record.fault_places.items()
    }
    # Not durable, like the datasets it speaks of: a damaged record is one that is not there.
    target = AtomicFile(record_path(prefix))
    try:
        target.write(json.dumps(tree).encode())
        publish(target, durable=False)
    finally:
        target.discard()


def read_record(prefix: str, datasets: Sequence[str], plan: str) -> ShardRecord | None:
    """The record at ``prefix``, if it is of this plan (a digest) and its ``datasets`` have the
    sizes and checksums they had.
    """
    try:
        tree = json.loads(record_path(prefix).read_bytes())
        if tree["plan"] != plan or not all(_is_whole(dataset) for dataset in datasets):
            return None
    except (OSError, ValueError, KeyError):  # cut short by a crash of the machine
        return None
    places = {kind: [Place(*at) for at in found] for kind, found in tree["fault_places"].items()}
    return ShardRecord(**{**tree, "fault_places": places}, kept=True)


def record_path(prefix: str) -> Path:
    return path_of(prefix, ".json")


def _is_whole(dataset: str) -> bool:
    meta = read_meta(dataset)
    if meta is None:
        return False
    index, tokens = path_of(dataset, ".idx"), path_of(dataset, ".bin")
    if tokens.stat().st_size != meta["bin"]["bytes"]:
        return False
    pieces = [(meta["idx"]["bytes"], meta["idx"]["xxh3_128"])]
    return _holds(index, pieces) and _holds(tokens, bin_checksums(meta))


def _holds(path: Path, pieces: Sequence[tuple[int, str]]) -> bool:
    with path.open("rb") as file:
        return all(_digest(file, size) == digest for size, digest in pieces) and not file.read(1)


def _digest(file: BinaryIO, size: int) -> str:
    hasher = xxhash.xxh3_128()
    while size > 0 and (block := file.read(min(size, 1 << 24))):
        hasher.update(block)
        size -= len(block)
    return hasher.hexdigest()
