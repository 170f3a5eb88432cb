"""Small local and remote datasets, and the batches of a run on either."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megapack.data import PackedDataset, Schedule, build_loader
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.remote.client import put_object
from megapack.storage.remote.copies import upload_dataset
from tests.data.corpora import packed_lengths

MICRO_BATCH = 1024
# A program that locks numbers of a name until its stdin ends: lock file, name, first, count.
HOLDS = """
import pathlib, sys
from megapack.storage.remote.cache import RangeLocks
with RangeLocks(pathlib.Path(sys.argv[1])).held(sys.argv[2], *map(int, sys.argv[3:])):
    print("held", flush=True)
    sys.stdin.read()
"""
ROOT = "s3://bucket"  # set by the fixture ``line``


def write_packed(prefix: Path, num_documents: int = 2000, seed: int = 0) -> IndexedDataset:
    """Write some 100 tokens per document, so 25 blocks of .bin, and a .samples file."""
    lengths = packed_lengths(num_documents, 400, seed)
    tokens = np.random.default_rng(seed).integers(1, 120, lengths.sum(), np.uint16)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(tokens, np.cumsum([0, *lengths]))
    documents = IndexedDataset(prefix)
    index = pack(documents.document_lengths, "bucket", buckets=[64, 256, 512])
    index.save(f"{prefix}.samples", source=documents)
    return documents


def address_of(prefix: Path) -> str:
    """Return an address that no other test writes to."""
    return f"{folder_of(prefix.parent)}/{prefix.name}"


def folder_of(folder: Path) -> str:
    """Return the address that belongs to a local folder."""
    return f"{ROOT}/{folder.name}"


def signed(content: dict[str, Any]) -> str:
    """Return a manifest with a correct checksum, as an attacker would write it."""
    content.pop("xxh3", None)
    digest = xxhash.xxh3_64_hexdigest(json.dumps(content).encode())
    return json.dumps({**content, "xxh3": digest})


def flip(path: Path, at: int) -> bytes:
    """Change one bit of a file; return its new content."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    return bytes(data)


def put_dataset(prefix: Path, num_documents: int = 2000, seed: int = 0) -> str:
    """Write and upload a dataset; return its address. The local files stay."""
    write_packed(prefix, num_documents, seed)
    upload_dataset(str(prefix), address_of(prefix))
    put_object(f"{address_of(prefix)}.samples", f"{prefix}.samples")
    return address_of(prefix)


def near_and_far(prefix: Path, num_documents: int = 2000) -> tuple[IndexedDataset, IndexedDataset]:
    """Return a local dataset and the same dataset at its address."""
    address = put_dataset(prefix, num_documents)
    return IndexedDataset(prefix), IndexedDataset(address)


def run(
    prefix: str | os.PathLike[str] | Sequence[Any], rank: int = 0, size: int = 1, **options: Any
) -> list[dict[str, Any]]:
    """Return every batch of a rank in one epoch, as lists, from one dataset or a blend."""
    prefixes = prefix if isinstance(prefix, list) else [prefix]
    data = PackedDataset(prefixes, [f"{os.fspath(each)}.samples" for each in prefixes])
    schedule = Schedule(data, tokens_per_step=2 * MICRO_BATCH, seed=3)
    options = {"data_parallel_rank": rank, "data_parallel_size": size, **options}
    loader = build_loader(data, schedule, micro_batch_tokens=MICRO_BATCH, **options)
    names = ("tokens", "labels", "loss_mask", "sample_ids")
    return [{name: np.asarray(batch[name]).tolist() for name in names} for batch in loader]
