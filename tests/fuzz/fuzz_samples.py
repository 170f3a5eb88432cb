"""Any change of a .samples file: refused in words, or every batch is what it was."""

from __future__ import annotations

import json
import random
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fuzz.mutate import change_value, mutate
from megapack.errors import MegapackError
from megapack.packing import SampleIndex, pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder

LENGTHS = [5, 9, 1, 30, 0, 7, 2, 11, 64, 3, 3, 17, 40, 8] * 3
_PREAMBLE = struct.Struct("<8sIIQQ")
_NUMBERS = [0, 1, -1, 2, 5, 14, 16, 100, 2**31 - 1, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63)]
_PACKINGS: list[dict[str, Any]] = [
    {"strategy": "bucket", "buckets": [8, 16, 32]},
    {"strategy": "concat", "buckets": 16},
    {"strategy": "bucket_llm", "buckets": [8, 32]},
]


def _documents(prefix: Path) -> IndexedDataset:
    ends = np.cumsum([0, *LENGTHS])
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(np.arange(1, ends[-1] + 1, dtype=np.uint16), ends)
    return IndexedDataset(prefix)


def _files() -> tuple[dict[str, bytes], list[bytes]]:
    """The dataset's, and the .samples files of it."""
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        dataset = _documents(directory / "data")
        seeds = []
        for i, packing in enumerate(_PACKINGS):
            path = directory / f"{i}.samples"
            pack(dataset.document_lengths, **packing, seed=i).save(path, source=dataset)
            seeds.append(path.read_bytes())
        return {name: (directory / name).read_bytes() for name in ("data.bin", "data.idx")}, seeds


@cache
def _expected() -> list[list[bytes]]:
    """The batches of every seed."""
    with tempfile.TemporaryDirectory() as directory:
        dataset = _documents(Path(directory) / "data")
        packings = [{**packing, "seed": i} for i, packing in enumerate(_PACKINGS)]
        return [_batches(dataset, pack(dataset.document_lengths, **how)) for how in packings]


def _batches(dataset: IndexedDataset, index: SampleIndex) -> list[bytes]:
    """Every array of the steps of an epoch, by the way that training goes."""
    from megapack.data import PackedDataset, Schedule  # noqa: PLC0415  (torch)

    packed = PackedDataset(dataset, index)
    schedule = Schedule(packed, tokens_per_step=32, seed=3, cost_window=2)
    result = []
    for i in range(schedule.num_steps()):
        step = schedule.step(i)
        for draw in step.draws:
            batch = packed.micro_batch(draw.sample_ids, capacity=draw.capacity)
            result += [np.asarray(batch[name]).tobytes() for name in sorted(batch)]
    result.append(packed.count_labels(np.arange(len(packed))).tobytes())
    return result


FILES, SEEDS = _files()


def change(rng: random.Random) -> bytes:
    """One number of an array, one value of the header (its checksum made to agree), or bytes."""
    data, kind = rng.choice(SEEDS), rng.random()
    if kind < 0.2:
        return mutate(rng, SEEDS, most=1 << 16)
    size = _PREAMBLE.unpack_from(data)[3]
    header = json.loads(data[_PREAMBLE.size : _PREAMBLE.size + size])
    return _with_number(rng, data, header) if kind < 0.8 else _with_value(rng, data, header)


def _with_number(rng: random.Random, data: bytes, header: dict[str, Any]) -> bytes:
    entry = rng.choice(list(header["arrays"].values()))
    dtype = np.dtype(entry["dtype"])
    at = entry["offset"] + dtype.itemsize * rng.randrange(entry["shape"][0])
    here = int(np.frombuffer(data, dtype, 1, at)[0])
    value = rng.choice([here + rng.choice([-2, -1, 1, 2]), rng.choice(_NUMBERS), rng.randrange(99)])
    limits = np.iinfo(dtype)
    value = min(max(value, int(limits.min)), int(limits.max))
    return data[:at] + np.array(value, dtype).tobytes() + data[at + dtype.itemsize :]


def _with_value(rng: random.Random, data: bytes, header: dict[str, Any]) -> bytes:
    size = _PREAMBLE.unpack_from(data)[3]
    change_value(rng, header)
    encoded = json.dumps(header).encode().ljust(size)
    digest = xxhash.xxh3_64_intdigest(encoded)
    preamble = _PREAMBLE.pack(data[:8], 2, 0, len(encoded), digest)
    return preamble + encoded + data[_PREAMBLE.size + size :]


def run(data: bytes, directory: Path) -> str:
    """Raises only what callers are told to expect; says what became of the change."""
    for name, content in (FILES | {"x.samples": data}).items():
        (directory / name).write_bytes(content)
    dataset = IndexedDataset(directory / "data")
    index = SampleIndex.load(directory / "x.samples")
    try:
        index.verify(dataset.document_lengths)
        sound = True
    except MegapackError:
        sound = False
    refused, same = False, False
    try:
        _read_all(index, dataset)
        same = _batches(dataset, index) in _expected()
    except MegapackError:
        refused = True
    assert same or refused, "a wrong batch"
    by_verify = "" if sound else ", and by verify"
    return f"refused when it is read{by_verify}" if refused else f"equal{by_verify}"


def _read_all(index: SampleIndex, dataset: IndexedDataset) -> None:
    """What else reads the arrays."""
    assert len(repr(index)) < 500
    assert index.metrics()["num_samples"] == index.num_samples
    for i in range(index.num_samples):
        index.sample(i)
    index.attention_cost()
    index.label_tokens(dataset.document_lengths)
