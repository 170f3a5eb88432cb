"""The last act of every dataset: index and meta file, then names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megapack.errors import ConfigError, FormatError
from megapack.storage.atomic import AtomicFile, Publishable, publish
from megapack.storage.layout import Layout, write_index
from megapack.storage.meta import (
    FORMAT,
    VERSION,
    Checksum,
    TokenFacts,
    checksum,
    meta_path,
    read_meta,
)
from megapack.storage.mmididx import path_of
from megapack.storage.replace import check_target, target_of

__all__ = ["DatasetContent", "check_prefix", "check_prefix_names", "publish_dataset"]

SUFFIXES = (".bin", ".idx", ".meta.json")


@dataclass(frozen=True, kw_only=True)
class DatasetContent:
    """What a dataset will hold: its .bin described, its .idx and its meta file in full."""

    dtype: np.dtype[Any]
    layouts: Sequence[Layout]
    tokens: TokenFacts
    vocab_size: int | None
    metadata: Mapping[str, Any]
    multimodal: bool = False

    def write_index(self, write: Callable[[Any], object]) -> Checksum:
        """Write the .idx; its size and checksum."""
        return write_index(write, self.dtype, self.layouts, multimodal=self.multimodal)

    def meta(self, idx: Checksum) -> dict[str, Any]:
        """The content of the meta file; ``meta.py`` explains it."""
        tokens = self.tokens
        low, high = tokens.token_range or (None, None)
        return {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype.name,
            "num_sequences": sum(layout.num_sequences for layout in self.layouts),
            "num_documents": sum(layout.num_documents for layout in self.layouts),
            "num_tokens": tokens.num_tokens,
            "min_token_id": low,
            "max_token_id": high,
            "vocab_size": self.vocab_size,
            "bin": {
                "bytes": sum(size for size, _ in tokens.checksums),
                "xxh3_128": [f"{size} {digest}" for size, digest in tokens.checksums],
            },
            "idx": {"bytes": idx.num_bytes, "xxh3_128": idx.xxh3_128},
            **self.metadata,
        }

    def difference_from(self, prefix: str) -> str | None:
        """How the dataset that stands at a prefix differs, None when it is this one. Compares the
        meta files and the checksum of .idx; .bin is not read.
        """
        idx_path, bin_path = path_of(prefix, ".idx"), path_of(prefix, ".bin")
        if not (idx_path.exists() and bin_path.exists()):
            return "it is not complete"
        try:
            there = read_meta(prefix)
        except FormatError as error:
            return str(error)
        if there is None:
            return "without a meta file nothing tells what it holds"
        meta = json.loads(json.dumps(self.meta(self.write_index(lambda _: None))))
        for key in meta | there:
            old, new = there.get(key), meta.get(key)
            if old != new:
                known = not isinstance(old, dict | list) and not isinstance(new, dict | list)
                return f"its {key} is {old!r}, not {new!r}" if known else f"its {key} differs"
        if checksum(idx_path) != meta["idx"]["xxh3_128"]:
            return "its .idx is not the one its meta file speaks of"
        if bin_path.stat().st_size != meta["bin"]["bytes"]:
            return "its .bin is not the one its meta file speaks of"
        return None


def check_prefix_names(prefix: str, *, keeps_bin: bool = False) -> list[Path]:
    """The files that a dataset at a prefix will be.

    Args:
        keeps_bin: the .bin that stands there will be the dataset's.

    Raises:
        ConfigError: one of them cannot be written (see ``replace``), or .bin is a link, as an
            import makes them: what it leads to may be somebody else's.
    """
    bin_path = path_of(prefix, ".bin")
    if not keeps_bin and bin_path.is_symlink() and bin_path.exists():
        raise ConfigError(
            f"{bin_path} is a link to {bin_path.resolve()}, which would be replaced: remove the "
            "link, or choose another prefix"
        )
    return [target_of(path_of(prefix, s)) for s in SUFFIXES if s != ".bin" or not keeps_bin]


def check_prefix(
    prefix: str,
    *,
    overwrite: bool,
    difference: str | Callable[[], str | None],
    keeps_bin: bool = False,
) -> bool:
    """``check_target`` of a whole dataset: any of its files counts.

    Raises:
        ConfigError: see ``check_target`` and ``check_prefix_names``.
    """
    there = [path for path in check_prefix_names(prefix, keeps_bin=keeps_bin) if path.exists()]
    return not there or check_target(there[0], overwrite=overwrite, difference=difference)


def publish_dataset(
    prefix: str,
    content: DatasetContent,
    bin_file: Publishable | None,
    *,
    idx_path: str | os.PathLike[str] | None = None,
    durable: bool = True,
) -> None:
    """Write what stands beside the tokens and give all files their names.

    Whoever looks at any moment finds the old dataset, none, or the new one: the old .idx goes
    before the new .bin has its name, and the new .idx comes last (see ``open_pair``).

    Args:
        prefix: of the dataset.
        content: of it.
        bin_file: the tokens, not published yet; None: they stand there already.
        idx_path: of the .idx; ``<prefix>.idx`` by default.
        durable: wait until everything is on disk.

    Raises:
        OSError: a file cannot be written; nothing has its name.
    """
    idx = AtomicFile(path_of(prefix, ".idx") if idx_path is None else idx_path)
    meta = AtomicFile(meta_path(prefix))
    try:
        described = content.meta(content.write_index(idx.write))
        meta.write((json.dumps(described, indent=1, ensure_ascii=False) + "\n").encode())
        files = [*([] if bin_file is None else [bin_file]), meta, idx]
        if durable:
            for file in files:  # the longest part, while the old dataset still stands
                file.sync()
        idx.path.unlink(missing_ok=True)
        publish(*files, durable=durable)
    finally:
        idx.discard()
        meta.discard()
