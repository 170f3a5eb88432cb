"""Random damage to a file of a source: an error of megapack, or all batches are unchanged.

Changes bits and bytes, zeroes ranges, cuts ends, exchanges blocks, or replaces a file by another of
its kind; then opens the source, schedules and gathers an epoch. Token ids and labels are an
exception by design: a gather does not compare checksums of a local .bin or .col; ``verify`` does,
and must find damage.
"""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megapack.errors import MegapackError
from megapack.packing import pack
from megapack.packing.shard_packing import describe_shard
from megapack.packing.sharded import PLAN, plain, save_shards
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.columns import INTERPRETED
from megapack.storage.verify import verify

BUCKETS = [8, 16, 64]
MANIFEST = "all.shards.json"
SHARDS = ("a", "b")
VALUES = {f"{shard}.{kind}" for shard in SHARDS for kind in ("bin", "labels.col")}


def _write(root: Path) -> None:
    """Write two packed datasets with labels and their manifest; arrays have many blocks."""
    rows = []
    for seed, name in enumerate(SHARDS):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(0, 5, 5_000 + 15_000 * seed)
        lengths[::25] = 33
        ends = np.cumsum([0, *lengths])
        tokens = rng.integers(0, 500, ends[-1])
        columns = {"labels": np.where(tokens % 5 == 0, -100, tokens)}
        with IndexedDatasetBuilder(
            root / name, np.uint16, vocab_size=500, columns={"labels": INTERPRETED["labels"]}
        ) as builder:
            builder.add_documents(tokens, ends, columns=columns)
        dataset = IndexedDataset(root / name)
        index = pack(dataset.document_lengths, "bucket", buckets=BUCKETS, seed=1)
        index.save(root / f"{name}.samples", source=dataset)
        rows.append(describe_shard(dataset, root / f"{name}.samples", index))
    how = {name: plain(getattr(index, name)) for name in PLAN}
    save_shards(root / MANIFEST, how, rows)


@cache
def _undamaged() -> tuple[tempfile.TemporaryDirectory[str], list[str], dict[str, str]]:
    """Return the folder of the undamaged files, their names, and a digest per source."""
    folder = tempfile.TemporaryDirectory()
    root = Path(folder.name)
    _write(root)
    names = sorted(path.name for path in root.iterdir())
    return folder, names, {source: _gathered(root, source) for source in ("a", MANIFEST)}


def _gathered(root: Path, source: str) -> str:
    from megapack.data import PackedDataset  # noqa: PLC0415  (torch)

    if source == MANIFEST:
        packed = PackedDataset(None, str(root / MANIFEST))
    else:
        packed = PackedDataset(root / source, root / f"{source}.samples")
    digest = epoch_digest(packed, tokens_per_step=2048, cost_window=4)
    assert packed.documents(0).meta is not None  # a run asks it for the vocabulary
    return digest


def epoch_digest(packed: Any, **options: Any) -> str:
    """Return a digest of all arrays of the steps of an epoch, gathered as in training."""
    from megapack.data import Schedule  # noqa: PLC0415  (torch)

    schedule = Schedule(packed, seed=3, **options)
    digest = hashlib.sha256()
    for i in range(schedule.num_steps()):
        step = schedule.step(i)
        digest.update(np.int64(step.num_label_tokens).tobytes())
        for draw in step.draws:
            batch = packed.micro_batch(draw.sample_ids, capacity=draw.capacity)
            for name in sorted(batch):
                digest.update(np.asarray(batch[name]).tobytes())
    digest.update(packed.count_labels(np.arange(len(packed))).tobytes())
    return digest.hexdigest()


def _damage(rng: random.Random, data: bytearray) -> None:
    kind = rng.choice(["flip", "flip", "bytes", "bytes", "zero", "cut", "swap"])
    at, small = rng.randrange(len(data)), rng.choice([1, 2, 4, 8])
    large = rng.choice([1, 8, 64, 512, 4096, 65536])
    if kind == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        data[at : at + small] = rng.randbytes(len(data[at : at + small]))
    elif kind == "zero":
        data[at : at + large] = bytes(len(data[at : at + large]))
    elif kind == "cut":
        del data[rng.choice([at, len(data) - 1, len(data) - 8]) :]
    else:  # exchange two blocks
        a, b = (rng.randrange(max(1, len(data) // large)) * large for _ in "ab")
        if len(data) >= max(a, b) + large:
            data[a : a + large], data[b : b + large] = data[b : b + large], data[a : a + large]


def change(rng: random.Random) -> bytes:
    """Return the name of a file, a zero byte, and its damaged content."""
    folder, names, _ = _undamaged()
    name = rng.choice(names)
    kind = name.split(".", 1)[1]
    if rng.random() < 0.03 and kind != "shards.json":
        name, other = (f"{shard}.{kind}" for shard in rng.sample(SHARDS, 2))
        return name.encode() + b"\0" + Path(folder.name, other).read_bytes()
    data = bytearray(Path(folder.name, name).read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if data:
            _damage(rng, data)
    return name.encode() + b"\0" + bytes(data)


SEEDS: list[bytes] = []


def run(data: bytes, directory: Path) -> str:
    damaged_name, content = data.split(b"\0", 1)
    damaged = damaged_name.decode()
    folder, names, expected = _undamaged()
    for name in names:
        if name != damaged:
            os.link(Path(folder.name, name), directory / name)
    (directory / damaged).write_bytes(content)
    source = "a" if damaged.startswith("a.") else MANIFEST
    kind = damaged.split(".", 1)[1]
    try:
        if _gathered(directory, source) == expected[source]:
            return f"{kind}: harmless, all batches are equal"
    except (MegapackError, OSError):
        return f"{kind}: refused"
    assert damaged in VALUES, f"a wrong batch after damage to {damaged}"
    findings = verify(directory / damaged.split(".")[0])
    assert any(finding.severity == "error" for finding in findings), "verify finds nothing"
    return f"{kind}: other values, which verify finds"
