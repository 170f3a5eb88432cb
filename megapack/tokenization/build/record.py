"""The record of a finished shard, whether its files are still what it says, and the sum of all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megapack.execution.work import Counted
from megapack.storage.atomic import atomic_write
from megapack.storage.meta import has_its_checksums
from megapack.storage.mmididx import path_of
from megapack.tokenization.corpus.faults import Faults, Place, fault_lines, lacks_documents

__all__ = [
    "ShardRecord",
    "Totals",
    "read_record",
    "record_path",
    "shard_prefix",
    "write_record",
]


class ShardRecord(NamedTuple):
    """A shard, built. Written last, so where it stands the shard was complete."""

    counted: Counted
    faults: Faults
    kept: bool = False  # found finished by this run; not on disk


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over many shards, as the manifest has them."""

    num_documents: int
    num_tokens: int
    num_text_bytes: int
    skipped: dict[str, int]  # by kind
    skipped_at: dict[str, list[str]]  # the first places of each kind

    @staticmethod
    def of_records(records: Sequence[ShardRecord]) -> Totals:
        counted, faults = Counted(), Faults("skip")
        for record in records:
            counted = counted.plus(record.counted)
            faults.add(record.faults)
        return Totals(
            num_documents=counted.documents,
            num_tokens=counted.tokens,
            num_text_bytes=counted.text_bytes,
            skipped=faults.counts,
            skipped_at={kind: [str(p) for p in found] for kind, found in faults.places.items()},
        )

    @staticmethod
    def of_manifest(content: Mapping[str, Any]) -> Totals:
        return Totals(**{field.name: content[field.name] for field in dataclasses.fields(Totals)})

    @property
    def lacks_documents(self) -> bool:
        """Whether some were left out that only ``--on-error skip`` leaves out."""
        return lacks_documents(self.skipped)

    @property
    def num_skipped(self) -> int:
        return sum(self.skipped.values())

    def fault_lines(self) -> list[str]:
        return fault_lines(self.skipped, self.skipped_at)


def shard_prefix(directory: Path, index: int) -> str:
    """Where a shard's datasets lie; their names go on with the stream and ``LABELS``."""
    return str(directory / f"shard-{index:06d}")


def record_path(prefix: str) -> Path:
    return path_of(prefix, ".json")


def write_record(prefix: str, plan: str, record: ShardRecord) -> None:
    """Write the record of a shard of a plan (a digest)."""
    faults = record.faults
    places = {kind: list(map(dataclasses.astuple, at)) for kind, at in faults.places.items()}
    faults_tree = {"fault_counts": faults.counts, "fault_places": places}
    tree = {"plan": plan, **record.counted._asdict(), **faults_tree}
    # Not durable, like the datasets it speaks of: a damaged record is one that is not there.
    with atomic_write(record_path(prefix), "w", durable=False) as file:
        json.dump(tree, file)


def read_record(prefix: str, plan: str, datasets: Sequence[str]) -> ShardRecord | None:
    """The record at ``prefix``, if it is of this plan (a digest) and its ``datasets`` have the
    sizes and checksums they had.
    """
    try:
        tree = json.loads(record_path(prefix).read_bytes())
        if tree["plan"] != plan or not all(map(has_its_checksums, datasets)):
            return None
        counted = Counted(*(tree[name] for name in Counted._fields))
        places = {kind: [Place(*p) for p in at] for kind, at in tree["fault_places"].items()}
        faults = Faults("skip", counts=tree["fault_counts"], places=places)
    except (OSError, ValueError, KeyError):  # cut short by a crash of the machine
        return None
    return ShardRecord(counted, faults, kept=True)
