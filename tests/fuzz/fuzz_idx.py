"""Random bytes as an .idx: every reader refuses them or reads consistent arrays."""

from __future__ import annotations

import random
import struct
from functools import partial
from pathlib import Path

import numpy as np

from fuzz.mutate import mutate
from megapack.storage import IndexedDataset
from megapack.storage.index_file import block_checksums
from megapack.storage.repair import repair
from megapack.storage.tokens import InputDataset
from megapack.storage.verify import verify

BIN = np.arange(40, dtype=np.uint16).tobytes()


def _index(lengths: list[int], documents: list[int], code: int, width: int) -> bytes:
    pointers = width * (np.cumsum([0, *lengths])[:-1] if lengths else np.zeros(0))
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(documents))
    arrays = (np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(documents, "<i8"))
    return head + b"".join(array.tobytes() for array in arrays)


SEEDS = [
    _index([], [0], 8, 2),
    _index([40], [0, 1], 8, 2),
    _index([3, 0, 7, 30], [0, 1, 2, 3, 4], 8, 2),
    _index([3, 7, 10], [0, 0, 2, 3], 4, 4),
    _index([5, 5], [0], 6, 2),
    _index([3, 1], [], 8, 2),
    _index([3, 0, 2, 4], [0, 1, 1, 3, 4], 8, 2),
    _index([1] * 40, list(range(41)), 8, 2) + bytes(40),
]

_CHECKSUMS = {block_checksums(np.frombuffer(data, np.uint8)) for data in SEEDS}


def change(rng: random.Random) -> bytes:
    """Return an .idx with one number or a few bytes changed."""
    if rng.random() < 0.3:
        return mutate(rng, SEEDS)
    data = bytearray(rng.choice(SEEDS[1:4]))
    num_sequences, num_indices = struct.unpack_from("<QQ", data, 18)
    fields = [(9, "<Q"), (17, "<B"), (18, "<Q"), (26, "<Q")]
    fields += [(34 + 4 * i, "<i") for i in range(num_sequences)]
    fields += [(34 + 4 * num_sequences + 8 * i, "<q") for i in range(num_sequences + num_indices)]
    at, kind = rng.choice(fields)
    (value,) = struct.unpack_from(kind, data, at)
    bits = 8 * struct.calcsize(kind)
    value = rng.choice([value - 1, value + 1, value + 2, -1, 0, 2**31, 2**62, rng.getrandbits(64)])
    value %= 2**bits
    struct.pack_into(kind.upper(), data, at, value)
    return bytes(data)


def run(data: bytes, directory: Path) -> str:
    (directory / "data.idx").write_bytes(data)
    (directory / "data.bin").write_bytes(BIN)
    prefix = directory / "data"
    valid = not any(finding.severity == "error" for finding in verify(prefix))
    readers = (_read, InputDataset, partial(repair, dry_run=True))
    refused = []
    for reader in readers:
        try:
            reader(prefix)
        except (ValueError, OSError) as error:
            refused.append(error)
    assert not (valid and refused), f"verify finds no error, but a reader raises: {refused[0]}"
    if data in SEEDS:
        return "equal"
    if len(refused) == len(readers):
        return "refused by all"
    if IndexedDataset.exists(prefix) and valid:
        # It is another dataset, and no .samples of the original accepts it.
        assert IndexedDataset(prefix).idx_checksums not in _CHECKSUMS
        return "another, and consistent"
    return "found by verify"


def _read(prefix: Path) -> None:
    dataset = IndexedDataset(prefix)
    lengths, offsets = dataset.document_lengths, dataset.document_offsets
    assert offsets[0] == 0 and (np.diff(offsets) == lengths).all()
    assert offsets[-1] == dataset.num_tokens == dataset.sequence_lengths.sum()
    sequences = dataset[:]
    assert np.array_equal(np.concatenate([dataset.tokens[:0], *sequences]), dataset.tokens)
