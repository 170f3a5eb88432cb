"""``<prefix>.checksums``: a checksum for every block of a remote .bin.

A checksum in a meta file covers gigabytes; reads of ranges need checksums of small blocks::

    8 bytes    magic "MEGASUMS"
    4 bytes    size of the header, little-endian
    header     JSON, UTF-8: version, block_bytes, bin_bytes, and files, for .idx and .meta.json:
               {suffix: {bytes, xxh3_128}}
    8 bytes    for every block of .bin (the last may be shorter): xxh3_64, little-endian
    16 bytes   xxh3_128 of all of the above

Datasets can be read without this file; then only sizes and versions of objects are compared.
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
from megapack.storage.files import atomic_write, file_identity, open_regular, read_array_blocks
from megapack.storage.index_file import path_of
from megapack.storage.metadata import file_checksum, has_its_checksums, read_meta
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
    """Content of a .checksums file."""

    bin_bytes: int  # size of .bin
    blocks: NDArray[np.uint64]  # (num_blocks,), xxh3_64 of every block of .bin
    files: dict[str, tuple[int, str]]  # suffix -> (bytes, xxh3_128) of the small files

    @staticmethod
    def read(path: Path) -> BlockChecksums:
        """Read a local file. Raises FormatError if it is damaged, or has another version."""
        data = path.read_bytes()
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if not data.startswith(_MAGIC) or xxhash.xxh3_128_digest(body) != digest:
            raise FormatError(f"{path} is damaged: its checksum differs; upload the dataset again")
        begin = len(_MAGIC) + _SIZE.size
        end = begin + _SIZE.unpack_from(body, len(_MAGIC))[0]
        header: dict[str, Any] = json.loads(body[begin:end])
        if header["version"] != _VERSION or header["block_bytes"] != BLOCK_BYTES:
            raise FormatError(
                f"{path} has version {header['version']} with blocks of {header['block_bytes']} "
                f"bytes; this megapack reads version {_VERSION} with {BLOCK_BYTES}"
            )
        return BlockChecksums(
            bin_bytes=header["bin_bytes"],
            blocks=np.frombuffer(body[end:], "<u8"),
            files={name: (f["bytes"], f["xxh3_128"]) for name, f in header["files"].items()},
        )

    def check(self, first: int, data: memoryview) -> None:
        """Check bytes that begin at block ``first``. Raises WrongBytesError if a checksum
        differs."""
        for block, begin in enumerate(range(0, len(data), BLOCK_BYTES), first):
            digest = xxhash.xxh3_64_intdigest(data[begin : begin + BLOCK_BYTES])
            if digest != self.blocks[block]:
                raise WrongBytesError(
                    f"bytes [{block * BLOCK_BYTES}, {(block + 1) * BLOCK_BYTES}) differ from "
                    f"{SUFFIX}"
                )


def write_checksums(prefix: str, path: str | os.PathLike[str]) -> None:
    """Write the checksums of a local dataset; reads all of .bin. Raises FormatError if there is a
    meta file and the files do not match it."""
    if read_meta(prefix) is not None and not has_its_checksums(prefix):
        raise FormatError(
            f"{prefix}: .bin or .idx do not have the checksums of the meta file; run "
            "`megapack-build verify` for the details"
        )
    files = {}
    for suffix in _SMALL:
        small = path_of(prefix, suffix)
        if small.exists() or suffix == ".idx":
            files[suffix] = {"bytes": small.stat().st_size, "xxh3_128": file_checksum(small)}
    with open_regular(path_of(prefix, ".bin")) as file:
        num_bytes = file_identity(file).num_bytes
        file_blocks = read_array_blocks(file, np.uint8, num_bytes, BLOCK_BYTES)
        blocks = np.fromiter((xxhash.xxh3_64_intdigest(block.data) for block in file_blocks), "<u8")
    sizes = {"version": _VERSION, "block_bytes": BLOCK_BYTES, "bin_bytes": num_bytes}
    header = json.dumps({**sizes, "files": files}).encode()
    body = b"".join((_MAGIC, _SIZE.pack(len(header)), header, blocks.tobytes()))
    with atomic_write(path) as out:
        out.write(body + xxhash.xxh3_128_digest(body))
