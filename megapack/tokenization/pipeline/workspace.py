"""Files of a build: ``<prefix>.build/<digest of its plan>/``, its locks and its records.

- ShardRecord, Totals: counts of a shard, and of all shards; write_record, read_record
- Workspace: the directory of a plan; finished and missing shards, shards of other plans
- estimate_build, check_space: size of the result, free space on the disk

    out.build/<digest>/plan.json                 the plan
    out.build/<digest>/shard-000000.bin, .idx    a shard's dataset
    out.build/<digest>/shard-000000.json         its record, written when the shard is complete
    out.manifest.json                            the plan and its totals: the build is complete

Each plan has its own directory, so shards of two plans are never mixed. A whole build locks
``<prefix>.build`` exclusively. Parts of a build share that lock, and each also locks its own part.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from os.path import realpath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megapack.errors import FormatError, LockedError, MegapackError
from megapack.executors import Counted
from megapack.records import parse_json
from megapack.storage import IndexedDataset
from megapack.storage.files import atomic_write, check_target
from megapack.storage.index_file import GROUPS, path_of
from megapack.storage.index_writer import check_prefix
from megapack.storage.locks import (
    FOLDER_MARK,
    WriterLock,
    is_own_folder,
    make_own_folder,
    remove_own_folder,
)
from megapack.storage.metadata import has_its_checksums, read_meta
from megapack.tokenization.corpus.documents import (
    Faults,
    Place,
    TextBlock,
    fault_lines,
    lacks_documents,
)
from megapack.tokenization.corpus.streams import input_digest
from megapack.tokenization.pipeline.plan import Plan, differences
from megapack.tokenization.tokenizers.coding import Coder
from megapack.tokenization.tokenizers.probe import sample_blocks
from megapack.units import size


class ShardRecord(NamedTuple):
    """Record of a finished shard, written after its datasets: a shard with one is complete."""

    counted: Counted
    faults: Faults
    special_tokens: Mapping[str, int]  # counts of special tokens in texts, by name
    kept: bool = False  # an earlier run built the shard; not in the file


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts over all shards, as in the manifest."""

    num_documents: int
    num_tokens: int
    num_text_bytes: int
    skipped: dict[str, int]  # by kind
    skipped_at: dict[str, list[str]]  # the first places of each kind
    special_tokens_found: dict[str, int]  # counts in texts, by name

    @staticmethod
    def of_records(records: Sequence[ShardRecord]) -> Totals:
        counted, faults = Counted(), Faults("skip")
        special: collections.Counter[str] = collections.Counter()
        for record in records:
            special.update(record.special_tokens)
            counted = counted.plus(record.counted)
            faults.add(record.faults)
        return Totals(
            num_documents=counted.documents,
            num_tokens=counted.tokens,
            num_text_bytes=counted.text_bytes,
            skipped=faults.counts,
            skipped_at={kind: [str(p) for p in places] for kind, places in faults.places.items()},
            special_tokens_found=dict(special.most_common()),
        )

    @staticmethod
    def of_manifest(content: Mapping[str, Any]) -> Totals:
        return Totals(**{field.name: content[field.name] for field in dataclasses.fields(Totals)})

    @property
    def num_skipped(self) -> int:
        return sum(self.skipped.values())

    def fault_lines(self) -> list[str]:
        return fault_lines(self.skipped, self.skipped_at)


def shard_prefix(directory: Path, index: int) -> str:
    """Return the prefix of a shard's datasets; streams and ``ends`` are appended to it."""
    return str(directory / f"shard-{index:06d}")


def record_path(prefix: str) -> Path:
    return path_of(prefix, ".json")


def write_record(prefix: str, plan: str, record: ShardRecord) -> None:
    """Write the record of a shard; ``plan`` is a digest."""
    faults = record.faults
    places = {kind: list(map(dataclasses.astuple, at)) for kind, at in faults.places.items()}
    faults_tree = {"fault_counts": faults.counts, "fault_places": places}
    special = {"special_tokens": dict(record.special_tokens)}
    tree = {"plan": plan, **record.counted._asdict(), **faults_tree, **special}
    # No fsync: a damaged record counts as missing.
    with atomic_write(record_path(prefix), "w", durable=False) as file:
        json.dump(tree, file)


def read_record(prefix: str, plan: str, datasets: Sequence[str]) -> ShardRecord | None:
    """Return a shard's record; None if it is damaged, of another plan (``plan`` is a digest), or a
    dataset does not match its size and checksums."""
    try:
        tree = json.loads(record_path(prefix).read_bytes())
        if tree["plan"] != plan or not all(map(has_its_checksums, datasets)):
            return None
        counted = Counted(*(tree[name] for name in Counted._fields))
        places = {kind: [Place(*p) for p in at] for kind, at in tree["fault_places"].items()}
        faults = Faults("skip", counts=tree["fault_counts"], places=places)
        special = dict(tree["special_tokens"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # missing, or truncated by a crash of the machine
    return ShardRecord(counted, faults, special, kept=True)


_FORMAT = {"format": "megapack build", "version": 3}
_PLAN = "plan.json"
_SHOWN = 5


class Workspace:
    """The files of one plan under one output prefix."""

    def __init__(self, plan: Plan) -> None:
        self._config = config = plan.config
        self._plan = plan
        self.root = Path(f"{config.output_prefix}.build")
        self.directory = self.root / plan.digest
        self._manifest = Path(f"{config.output_prefix}.manifest.json")
        # This file exists while outputs are written. If a killed run left it, outputs may be
        # missing.
        self._joining = self.directory / "joining"

    def finished(self) -> Totals | None:
        """Return the totals if this build is complete, None if it has to run. Raises ConfigError:
        an output name belongs to another dataset, or cannot be written."""
        if not self.root.parent.is_dir():
            return None
        overwrite = self._config.overwrite
        check_target(self._manifest, overwrite=overwrite, difference=None)  # is it writable?
        try:
            before = _read(self._manifest)
        except FormatError:
            if not overwrite:
                raise
            before = None
        is_new = [
            check_prefix(
                p,
                overwrite=overwrite,
                difference=partial(self._difference, before, p),
                columns=() if stream.endswith(GROUPS) else self._plan.columns,
            )
            for stream, p in self._config.outputs.items()
        ]
        exist = all(map(IndexedDataset.exists, self._config.outputs.values()))
        return Totals.of_manifest(before) if before and exist and not any(is_new) else None

    def _difference(self, before: Mapping[str, Any] | None, prefix: str) -> str | None:
        """Return how the dataset at an output prefix differs from this plan's; None: equal."""
        changed = [] if before is None else self._changes(before)
        if changed:
            return f"it was built with a different plan:\n  {_lines(changed)}"
        made_by = _plan_of(prefix)
        if made_by == self._plan.digest or (made_by is None and self._joining.exists()):
            return None
        if before is not None and made_by == before["digest"]:  # only the sharding differs
            return None
        return "it was not made by this build"

    def _changes(self, before: Mapping[str, Any]) -> list[str]:
        """Return the differences between a manifest and this plan, except sharding."""
        now = self._plan.tree()
        for key in ("shard_bytes", "shards"):
            del now[key]
        if now["inputs"] != before["inputs"]:
            now["inputs"] = self._inputs_as_before(before)
        # "skip" reuses any finished build; "fail" reuses one that dropped no documents.
        if now["on_error"] == "skip" or not lacks_documents(before["skipped"]):
            del now["on_error"]
        return differences(before, now)

    def _inputs_as_before(self, before: Mapping[str, Any]) -> list[Any]:
        """Return the inputs of the plan's tree. Up to the first with other contents than a finished
        build's, they are those of its manifest: only times or paths differ. Reads only files whose
        path or modification time differs."""
        result, old = list(self._plan.tree()["inputs"]), before["inputs"]
        digests, inputs = before.get("input_digests", []), self._plan.inputs
        if not len(inputs) == len(digests) == len(old):
            return result
        for i, (file, digest) in enumerate(zip(inputs, digests, strict=True)):
            path, num_bytes, mtime_ns, *kind = old[i]
            if (file.size, file.format, file.compression) != (num_bytes, *kind):
                break
            unchanged = file.mtime_ns == mtime_ns and realpath(file.path) == realpath(path)
            if not unchanged and (digest is None or digest != input_digest(file)):
                break
            result[i] = old[i]
        return result

    @contextlib.contextmanager
    def locked(self, note: Callable[[str], None]) -> Iterator[None]:
        """Lock the workspace, or this part of it; create it, or empty it for ``overwrite``.
        ``note`` receives sentences about shards of other plans. Raises LockedError if another
        process holds the lock."""
        part = self._config.part
        make_own_folder(self.root)
        with contextlib.ExitStack() as stack:
            stack.enter_context(WriterLock(self.root, what="tokenize", shared=part is not None))
            self._start_over()
            self.directory.mkdir(parents=True, exist_ok=True)
            if part is not None:
                name = f"part-{part[0]}-of-{part[1]}"
                stack.enter_context(WriterLock(self.directory / name, what="tokenize"))
                if self._config.overwrite:
                    for index in range(part[0], len(self._plan.shards), part[1]):
                        record = record_path(shard_prefix(self.directory, index))
                        # Remove the record first: the files of a shard without one are ignored.
                        record.unlink(missing_ok=True)
                        for path in self.directory.glob(f"{record.stem}*"):
                            path.unlink()
            if not (self.directory / _PLAN).exists():
                self._write(self.directory / _PLAN)
            for line in self.other_plans():
                note(line)
            yield

    def missing(self) -> list[int]:
        # List the directory, because NFS may still report a new file as missing if asked for it.
        recorded = set(self.directory.glob("shard-*.json"))
        prefixes = [shard_prefix(self.directory, i) for i in range(len(self._plan.shards))]
        return [i for i, prefix in enumerate(prefixes) if record_path(prefix) not in recorded]

    def other_plans(self) -> list[str]:
        """Return a sentence for every other plan with shards here."""
        lines = []
        for directory in self._plans():
            if directory == self.directory:
                continue
            try:
                changed = differences(_read(directory / _PLAN) or {}, self._plan.tree())
            except FormatError:
                changed = ["its plan cannot be read"]
            num_bytes = size(directory_bytes(directory))
            lines.append(
                f"{directory} has {num_bytes} of shards of another plan; --overwrite removes "
                f"them:\n  {_lines(changed)}"
            )
        return lines

    def mark_incomplete(self) -> None:
        """Record that the outputs are incomplete; remove the manifest of an older dataset."""
        self._joining.touch()
        self._manifest.unlink(missing_ok=True)

    def finish(self, totals: Totals) -> None:
        """Write the manifest, which marks the build as complete; remove the shards."""
        self._write(self._manifest, totals)
        self._remove()

    def remove_leftovers(self) -> None:
        """Remove the shards of a complete build whose run was killed after the last output."""
        if is_own_folder(self.root):
            # If another process holds the lock, that process removes the shards.
            with contextlib.suppress(LockedError), WriterLock(self.root, what="tokenize"):
                self._start_over()
                self._remove()

    def _start_over(self) -> None:
        if self._config.overwrite and self._config.part is None and not self._config.finish:
            for directory in self._plans():
                shutil.rmtree(directory)

    def _remove(self) -> None:
        if not self._config.keep_shards:
            shutil.rmtree(self.directory, ignore_errors=True)
            if [path.name for path in self.root.iterdir()] == [FOLDER_MARK]:
                remove_own_folder(self.root)

    def _plans(self) -> list[Path]:
        return sorted(path.parent for path in self.root.glob(f"*/{_PLAN}"))

    def _write(self, path: Path, totals: Totals | None = None) -> None:
        content = {**_FORMAT, "digest": self._plan.digest, **self._plan.tree()}
        if totals is not None:
            content |= dataclasses.asdict(totals)
            inputs, workers = self._plan.inputs, self._config.workers
            num_files = 1 + len(inputs) // (16 * workers)  # per task
            parts = [inputs[i : i + num_files] for i in range(0, len(inputs), num_files)]
            with ThreadPoolExecutor(workers) as threads:
                digests = threads.map(lambda part: [*map(input_digest, part)], parts)
                content["input_digests"] = [digest for part in digests for digest in part]
        # A line per key: Python's C encoder does not indent, and millions of inputs need it.
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
        with atomic_write(path, "w") as file:
            file.write("{\n" + ",\n".join(lines) + "\n}")


def _read(path: Path) -> dict[str, Any] | None:
    """Return the plan in a file; None without a file. Raises FormatError if it is damaged."""
    try:
        content = parse_json(path.read_bytes(), path, remedy="start over with --overwrite")
    except FileNotFoundError:
        return None
    if not isinstance(content, dict) or not _FORMAT.items() <= content.items():
        raise FormatError(f"{path} is not a plan of this version; start over with --overwrite")
    return content


def _plan_of(prefix: str) -> str | None:
    """Return the plan digest in a dataset's meta file; None without a meta file."""
    try:
        meta = read_meta(prefix)
    except FormatError:
        return ""
    return None if meta is None else str(meta.get("plan"))


def _lines(changed: Sequence[str]) -> str:
    num_hidden = len(changed) - _SHOWN
    lines = [*changed[:_SHOWN], *([f"... and {num_hidden} more"] if num_hidden > 0 else [])]
    return "\n  ".join(lines)


# ---- Estimated size, and free space on the disk -------------------------------------------------

_INDEX_BYTES = 20  # per document in .idx
_SURE = 0.8  # a sample may overestimate: raise only if this fraction does not fit


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated content of all shards of a plan."""

    num_documents: int
    num_tokens: int
    num_bytes: int  # on disk, .bin and .idx


def estimate_build(plan: Plan, coder: Coder) -> Estimate:
    """Estimate the result from the beginnings of a few shards."""
    bytes_read = documents = tokens = 0
    for block in sample_blocks(plan.shards, plan.read):
        coded = coder(block, Faults("skip"))
        bytes_read += _bytes_read(block)
        documents += len(coded.offsets) - 1
        tokens += len(coded.tokens)
    scale = plan.num_bytes(range(len(plan.shards))) / max(1, bytes_read)
    num_bytes = documents * _INDEX_BYTES * len(plan.ends)
    for end in plan.ends:
        stored = documents if end == GROUPS else tokens
        num_bytes += stored * np.dtype(plan.stored(end)["dtype"]).itemsize
    num_bytes += tokens * sum(spec.row_bytes for spec in plan.columns.values())
    return Estimate(
        num_documents=round(documents * scale),
        num_tokens=round(tokens * scale),
        num_bytes=math.ceil(num_bytes * scale),
    )


def _bytes_read(block: TextBlock) -> int:
    """Return the size of a sample in the unit of ``Shard.num_bytes``: bytes of the file for plain
    JSON Lines, else bytes of the text."""
    text = len(block.text)
    if block.place(0).unit != "byte" or len(block) == 1:
        return text
    span = int(block.positions[-1] - block.positions[0])
    return round(text * span / max(1, int(block.offsets[-2])))


def check_space(directory: Path, needed: int, *, to_join: int, note: Callable[[str], None]) -> None:
    """Raise MegapackError if the disk of ``directory`` cannot hold ``needed`` bytes of shards; call
    ``note`` if it cannot hold ``to_join`` bytes of the result as well. Both are approximate."""
    free = free_bytes(directory)
    if needed * _SURE > free:
        raise MegapackError(
            f"{directory} has {size(free)} free, and the build needs about {size(needed)}: free "
            "some space, or choose an --output-prefix on a larger disk"
        )
    if needed + to_join > free:
        note(
            f"{directory} has {size(free)} free, enough for the shards (about {size(needed)}) "
            f"but not for the result as well (about {size(to_join)}): each shard is deleted after "
            "it is copied, and has to be built again if the run stops before the result is complete"
        )


def free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def directory_bytes(directory: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for path in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
    return total
