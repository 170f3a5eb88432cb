"""Random changes of a .samples file: an error of megapack, or all batches are unchanged."""

from __future__ import annotations

import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.fuzz_damage import epoch_digest
from fuzz.mutate import change_value, mutate
from megapack.errors import MegapackError
from megapack.packing import SampleIndex, pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from tests.packing.packing_inputs import header_of, with_header

LENGTHS = [5, 9, 1, 30, 0, 7, 2, 11, 64, 3, 3, 17, 40, 8] * 3
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
    """Return the files of a dataset and its .samples files."""
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
def _expected() -> list[str]:
    """Return a digest of the batches of every seed."""
    with tempfile.TemporaryDirectory() as directory:
        dataset = _documents(Path(directory) / "data")
        packings = [{**packing, "seed": i} for i, packing in enumerate(_PACKINGS)]
        return [_gathered(dataset, pack(dataset.document_lengths, **how)) for how in packings]


def _gathered(dataset: IndexedDataset, index: SampleIndex) -> str:
    from megapack.data import PackedDataset  # noqa: PLC0415  (torch)

    return epoch_digest(PackedDataset(dataset, index), tokens_per_step=32, cost_window=2)


FILES, SEEDS = _files()


def change(rng: random.Random) -> bytes:
    """Return a file with one number, one header value (with a valid checksum) or bytes changed."""
    data, kind = rng.choice(SEEDS), rng.random()
    if kind < 0.2:
        return mutate(rng, SEEDS, most=1 << 16)
    header = header_of(data)
    if kind < 0.8:
        return _with_number(rng, data, header)
    change_value(rng, header)
    return with_header(data, header, may_grow=True)


def _with_number(rng: random.Random, data: bytes, header: dict[str, Any]) -> bytes:
    entry = rng.choice(list(header["arrays"].values()))
    dtype = np.dtype(entry["dtype"])
    at = entry["offset"] + dtype.itemsize * rng.randrange(entry["shape"][0])
    old = int(np.frombuffer(data, dtype, 1, at)[0])
    value = rng.choice([old + rng.choice([-2, -1, 1, 2]), rng.choice(_NUMBERS), rng.randrange(99)])
    limits = np.iinfo(dtype)
    value = min(max(value, int(limits.min)), int(limits.max))
    return data[:at] + np.array(value, dtype).tobytes() + data[at + dtype.itemsize :]


def run(data: bytes, directory: Path) -> str:
    for name, content in (FILES | {"x.samples": data}).items():
        (directory / name).write_bytes(content)
    dataset = IndexedDataset(directory / "data")
    index = SampleIndex.load(directory / "x.samples")
    try:
        index.verify(dataset.document_lengths)
        valid = True
    except MegapackError:
        valid = False
    refused, same = False, False
    try:
        _read_all(index, dataset)
        same = _gathered(dataset, index) in _expected()
    except MegapackError:
        refused = True
    assert same or refused, "a wrong batch"
    by_verify = "" if valid else ", and by verify"
    return f"refused when it is read{by_verify}" if refused else f"equal{by_verify}"


def _read_all(index: SampleIndex, dataset: IndexedDataset) -> None:
    """Call all other readers of the arrays."""
    assert len(repr(index)) < 500
    assert index.metrics()["num_samples"] == index.num_samples
    for i in range(index.num_samples):
        index.sample(i)
    index.attention_cost()
    index.label_tokens(dataset.document_lengths)
