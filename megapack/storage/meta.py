"""``<prefix>.meta.json``: what a dataset says of itself. Reading works without it.

Keys: ``format``, ``version``, ``dtype``, ``num_sequences``, ``num_documents``, ``num_tokens``,
``max_token_id`` (null when unknown), ``vocab_size`` (null when unknown), ``bin`` and ``idx`` with
their ``bytes`` and checksums, and whatever the builder was told in ``metadata``, such as
``tokenizer``, ``command`` and ``document_end_token`` (the id that ends every non-empty document).

The checksum of .bin is a list of ``[bytes, xxh3_128]`` pieces in order: a merge takes the pieces
of its shards over, reads no token twice, and a shard that was damaged before the merge is still
found after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from megapack.errors import FormatError
from megapack.storage.mmididx import path_of

__all__ = ["Piece", "encode_meta", "meta_path", "read_meta"]

Piece: TypeAlias = tuple[int, str]  # bytes, xxh3_128 in hexadecimal

FORMAT = "megapack dataset"
VERSION = 1
OWN_KEYS = frozenset(
    [
        "format",
        "version",
        "dtype",
        "num_sequences",
        "num_documents",
        "num_tokens",
        "max_token_id",
        "vocab_size",
        "bin",
        "idx",
    ]
)


def meta_path(prefix: str | os.PathLike[str]) -> Path:
    """The name of a dataset's meta file."""
    return path_of(prefix, ".meta.json")


def encode_meta(own: Mapping[str, Any], metadata: Mapping[str, Any]) -> bytes:
    """The file's content; ``metadata`` comes from the caller and may not take our keys."""
    taken = sorted(OWN_KEYS & metadata.keys())
    if taken:
        raise ValueError(f"metadata has the keys {taken}, which the builder fills in itself")
    content = {"format": FORMAT, "version": VERSION, **own, **metadata}
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def read_meta(prefix: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The meta file of a dataset, None when there is none.

    Raises:
        FormatError: it is not JSON, not ours, or of a newer version.
    """
    path = meta_path(prefix)
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise FormatError(
            f"{path} is not valid JSON: {error}; delete it, it is optional"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FormatError(f"{path} is not a megapack meta file; move it out of the way")
    if content.get("version") != VERSION:
        raise FormatError(
            f"{path} has version {content.get('version')!r}; this megapack reads {VERSION}"
        )
    return content
