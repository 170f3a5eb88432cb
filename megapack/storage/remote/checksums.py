"""``<prefix>.checksums``: a checksum for every block of a remote .bin and of every column.

Reads of ranges need checksums of small blocks; one in a meta file covers megabytes or more::

    8 bytes    magic "MEGASUMS"
    4 bytes    size of the header, little-endian
    header     JSON, UTF-8: version, block_bytes, bin_bytes, and files, for .idx and .meta.json:
               {suffix: {bytes, xxh3_128}}; only with columns: columns, {name: bytes}
    8 bytes    for every block of .bin, then of every column in the order of the header (the last
               block of each may be shorter): xxh3_64, little-endian
    16 bytes   xxh3_128 of all of the above

Datasets can be read without this file; then only sizes and versions of objects are compared.

A dataset of 5,000 uint16 tokens with a float32 column has 1 + 2 blocks::

    sums = DatasetChecksums.read(Path("corpus.checksums"))
    sums.blocks[".loss.col"].num_bytes, len(sums.blocks[".loss.col"].digests)    # -> 20000, 2
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.errors import FormatError
from megapack.storage.columns import column_entries, column_path
from megapack.storage.files import atomic_write, file_identity, open_regular, read_array_blocks
from megapack.storage.index_file import map_file, path_of
from megapack.storage.metadata import file_checksum, has_its_checksums, meta_path, read_meta
from megapack.storage.remote.client import WrongBytesError

SUFFIX = ".checksums"
# Small, so that reading a document of a few kilobytes fetches little else; but large enough that
# the checksums are only 0.05 % of the size of .bin.
BLOCK_BYTES = 1 << 14

_MAGIC = b"MEGASUMS"
_VERSION = 1
_SIZE = struct.Struct("<I")
_DIGEST_BYTES = 16
_SMALL = (".idx", ".meta.json")


@dataclass(frozen=True, kw_only=True)
class BlockChecksums:
    num_bytes: int
    digests: NDArray[np.uint64]  # (num_blocks,), xxh3_64 of every block

    def check(self, first: int, data: memoryview) -> None:
        """Raise WrongBytesError if bytes that begin at block ``first`` are damaged."""
        for block, begin in enumerate(range(0, len(data), BLOCK_BYTES), first):
            digest = xxhash.xxh3_64_intdigest(data[begin : begin + BLOCK_BYTES])
            if digest != self.digests[block]:
                raise WrongBytesError(
                    f"bytes [{block * BLOCK_BYTES}, {(block + 1) * BLOCK_BYTES}) differ from "
                    f"{SUFFIX}"
                )


@dataclass(frozen=True, kw_only=True)
class DatasetChecksums:
    blocks: dict[str, BlockChecksums]  # suffix -> checksums, for ".bin" and ".<name>.col"
    files: dict[str, tuple[int, str]]  # suffix -> (bytes, xxh3_128) of the small files

    @staticmethod
    def read(path: Path) -> DatasetChecksums:
        """Map a local file. Raises FormatError if it is damaged, or has another version."""
        with open_regular(path) as file:
            data = map_file(file)
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:].tobytes()
        if body[: len(_MAGIC)].tobytes() != _MAGIC or xxhash.xxh3_128_digest(body.data) != digest:
            raise FormatError(f"{path} is damaged: its checksum differs; upload the dataset again")
        begin = len(_MAGIC) + _SIZE.size
        end = begin + _SIZE.unpack_from(body.data, len(_MAGIC))[0]
        header: dict[str, Any] = json.loads(body[begin:end].tobytes())
        if header["version"] != _VERSION or header["block_bytes"] != BLOCK_BYTES:
            raise FormatError(
                f"{path} has version {header['version']} with blocks of {header['block_bytes']} "
                f"bytes; this megapack reads version {_VERSION} with {BLOCK_BYTES}"
            )
        columns = {f".{name}.col": size for name, size in header.get("columns", {}).items()}
        blocks = {}
        for suffix, num_bytes in {".bin": header["bin_bytes"], **columns}.items():
            begin, end = end, end + 8 * -(-num_bytes // BLOCK_BYTES)
            blocks[suffix] = BlockChecksums(
                num_bytes=num_bytes, digests=body[begin:end].view("<u8")
            )
        files = {name: (f["bytes"], f["xxh3_128"]) for name, f in header["files"].items()}
        return DatasetChecksums(blocks=blocks, files=files)


def write_checksums(prefix: str, path: str | os.PathLike[str]) -> None:
    """Write the checksums of a local dataset; reads all of .bin and its columns. Raises FormatError
    if the files do not match the meta file."""
    meta = read_meta(prefix)
    columns = column_entries(meta, meta_path(prefix))
    if meta is not None and not has_its_checksums(prefix):
        raise FormatError(
            f"{prefix}: .bin, .idx or columns do not have the checksums of the meta file; run "
            "`megapack-build verify` for the details"
        )
    files = {}
    for suffix in _SMALL:
        small = path_of(prefix, suffix)
        if small.exists() or suffix == ".idx":
            files[suffix] = {"bytes": small.stat().st_size, "xxh3_128": file_checksum(small)}
    bin_bytes, digests = _digests_of(path_of(prefix, ".bin"))
    header: dict[str, Any] = {"version": _VERSION, "block_bytes": BLOCK_BYTES}
    header |= {"bin_bytes": bin_bytes, "files": files}
    all_digests = [digests]
    for name in columns:
        num_bytes, digests = _digests_of(column_path(prefix, name))
        header.setdefault("columns", {})[name] = num_bytes
        all_digests.append(digests)
    encoded = json.dumps(header).encode()
    body = b"".join((_MAGIC, _SIZE.pack(len(encoded)), encoded, *all_digests))
    with atomic_write(path) as out:
        out.write(body + xxhash.xxh3_128_digest(body))


def _digests_of(path: Path) -> tuple[int, bytes]:
    with open_regular(path) as file:
        num_bytes = file_identity(file).num_bytes
        blocks = read_array_blocks(file, np.uint8, num_bytes, BLOCK_BYTES)
        digests = np.fromiter((xxhash.xxh3_64_intdigest(block.data) for block in blocks), "<u8")
    return num_bytes, digests.tobytes()
