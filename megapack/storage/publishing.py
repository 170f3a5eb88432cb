"""The last act of every dataset: index and meta file, then names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megapack.storage.atomic import AtomicFile, Buffer, publish
from megapack.storage.index_writer import Part, write_index
from megapack.storage.meta import Piece, encode_meta, meta_path
from megapack.storage.token_writer import TokenWriter

__all__ = ["publish_dataset", "write_index_file"]


def publish_dataset(
    tokens: TokenWriter,
    parts: Sequence[Part],
    *,
    prefix: str | os.PathLike[str],
    idx_path: Path,
    multimodal: bool,
    metadata: Mapping[str, Any],
    durable: bool = True,
) -> None:
    """Write what stands beside the tokens and give all files their names.

    Whoever looks at any moment finds the old dataset, none, or the new one.

    Args:
        tokens: all of them, appended.
        parts: their sequences and documents.
        prefix: of the meta file.
        idx_path: final name of the .idx.
        multimodal: the parts have modes.
        metadata: for the meta file.
        durable: wait until everything is on disk.

    Raises:
        OSError: a file cannot be written; nothing has its name.
    """
    facts, dtype = tokens.finish(), tokens.limits.dtype
    idx, meta = AtomicFile(idx_path), AtomicFile(meta_path(prefix))
    try:
        piece = write_index_file(idx, dtype, parts, multimodal=multimodal)
        meta.write(
            encode_meta(
                dtype=dtype.name,
                num_sequences=sum(part.num_sequences for part in parts),
                num_documents=sum(part.num_documents for part in parts),
                tokens=facts,
                vocab_size=tokens.limits.vocab_size,
                idx=piece,
                metadata=metadata,
            )
        )
        files = (tokens.target, idx, meta)
        if durable:
            for file in files:  # the longest part, while the old dataset still stands
                file.sync()
        # The old .idx beside the new .bin would look like a dataset and be none.
        idx.path.unlink(missing_ok=True)
        meta.path.unlink(missing_ok=True)
        publish(*files, durable=durable)
    finally:
        idx.discard()
        meta.discard()


def write_index_file(
    file: AtomicFile, dtype: np.dtype[Any], parts: Sequence[Part], *, multimodal: bool = False
) -> Piece:
    """Write a whole .idx; its size and checksum."""
    hasher = xxhash.xxh3_128()

    def write(data: Buffer) -> None:
        file.write(data)
        hasher.update(data)

    write_index(write, dtype, parts, multimodal=multimodal)
    return file.position, hasher.hexdigest()
