"""``<prefix>.meta.json``: optional description of a dataset. Datasets can be read without it.

===================  ===========================================================================
format, version      ``"megapack dataset"``, 1
dtype                of the tokens
num_sequences,       counts
num_documents,
num_tokens
min_token_id,        null without tokens
max_token_id
vocab_size           number of the tokenizer's token ids; null if unknown
bin, idx             ``bytes`` and ``xxh3_128``; .bin has a list of ``"bytes checksum"``
columns              name -> type, size and checksums of each column; absent without columns
metadata's keys      the builder's ``metadata``: ``tokenizer``, ``command``, ...; verify checks
                     ``document_end_token``, the id at the end of every non-empty document
===================  ===========================================================================

A merge copies the checksums of its inputs instead of computing them. So it reads every token only
once, and verify also detects inputs that were damaged before the merge.
"""

from __future__ import annotations

import glob
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from megapack.errors import FormatError
from megapack.records import parse_json
from megapack.storage.files import file_identity, open_regular, read_array_blocks
from megapack.storage.index_file import IndexHeader, name_of, path_of, pick_dtype


class Checksum(NamedTuple):
    """Checksum of a file or of consecutive bytes of it (a stretch)."""

    num_bytes: int
    xxh3_128: str  # hexadecimal


@dataclass(frozen=True)
class TokenFacts:
    """Count, checksums and range of the tokens of a .bin."""

    num_tokens: int
    checksums: list[Checksum]
    token_range: tuple[int, int] | None  # smallest and largest id; None without tokens

    @staticmethod
    def of_meta(meta: Mapping[str, Any]) -> TokenFacts:
        low, high = meta["min_token_id"], meta["max_token_id"]
        token_range = None if low is None else (low, high)
        return TokenFacts(meta["num_tokens"], stretches_of(meta["bin"]), token_range)


def joined_range(ranges: Iterable[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Return the smallest range that includes all ranges."""
    known = [limits for limits in ranges if limits is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


FORMAT = "megapack dataset"
VERSION = 1
COUNTS = ("num_sequences", "num_documents", "num_tokens")
LIMITS = ("min_token_id", "max_token_id", "vocab_size")
BOUNDARY_TOKENS = ("document_begin_token", "document_end_token")
OWN_KEYS = {"format", "version", "dtype", *COUNTS, *LIMITS, "bin", "idx"}
COLUMNS = "columns"  # key that only datasets with columns have


def meta_path(prefix: str | os.PathLike[str]) -> Path:
    return path_of(prefix, ".meta.json")


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise ValueError, before hours of work, if the meta file cannot contain the metadata."""
    taken = sorted((OWN_KEYS | {COLUMNS}) & metadata.keys())
    if taken:
        raise ValueError(f"metadata has the keys {taken}, which the builder sets; rename them")
    try:
        json.dumps(metadata, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        text = error.object[max(0, error.start - 20) : error.end + 20]
        raise ValueError(
            f"metadata contains {text!r}, which is not valid Unicode and cannot be written as "
            "UTF-8: leave it out, or decode it differently"
        ) from error


def own_metadata(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that the builder's ``metadata`` added to a meta file."""
    return {key: value for key, value in meta.items() if key not in {*OWN_KEYS, COLUMNS}}


def common_metadata(metas: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return the metadata on which all datasets agree; a dataset without a meta file has none."""
    first, *others = [own_metadata(meta or {}) for meta in metas]
    return {
        key: value
        for key, value in first.items()
        if all(key in meta and meta[key] == value for meta in others)
    }


def read_meta(prefix: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the meta file of a dataset, or None. Raises FormatError for invalid JSON, another
    tool's file, a newer version, or missing keys."""
    path = name_of(prefix, ".meta.json")
    try:
        with open_regular(path) as file:
            # Only an error may list the folder, which can have thousands of datasets.
            content = parse_json(file.readall(), path, remedy=partial(meta_remedy, prefix))
    except FileNotFoundError:
        return None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise FormatError(f"{path} is not a megapack meta file; move or rename it")
    if content.get("version") != VERSION:
        raise FormatError(
            f"{path} has version {content.get('version')!r}; this megapack reads {VERSION}"
        )
    if not _is_complete(content):
        raise FormatError(f"{path} has missing or invalid keys; {meta_remedy(prefix)}")
    return content


def meta_remedy(prefix: str | os.PathLike[str]) -> str:
    """Return what to do about a damaged meta file; without it the columns cannot be read."""
    path = meta_path(prefix)
    base = path.name.removesuffix(".meta.json")
    names = [
        file.name[len(base) + 1 : -4] for file in path.parent.glob(f"{glob.escape(base)}.*.col")
    ]
    columns = ", ".join(sorted(name for name in names if "." not in name))
    if columns:
        return f"restore it from a copy, or delete it and add the columns {columns} again"
    return "delete it: it is optional"


def differing_tokens(named: Callable[[str], Iterable[tuple[str, Any]]]) -> Iterator[str]:
    """Yield a sentence if documents of datasets begin with different tokens, and another if they
    end with different tokens. ``named`` returns (prefix, token) of the datasets for a key of
    ``BOUNDARY_TOKENS``; None means no token, "unknown" a dataset without a meta file."""
    for fact, where in zip(BOUNDARY_TOKENS, ("begin", "end"), strict=True):
        tokens: dict[str, str] = {}  # token -> first dataset that has it
        for prefix, token in named(fact):
            tokens.setdefault("no token" if token is None else str(token), prefix)
        if len(tokens) > 1 and tokens.keys() != {"unknown", "no token"}:
            differing = ", ".join(f"{token} ({prefix})" for token, prefix in tokens.items())
            yield f"documents {where} with different tokens: {differing}"


def matching_meta(
    prefix: str | os.PathLike[str], dtype: str, header: IndexHeader, num_tokens: int
) -> dict[str, Any] | None:
    """Return the meta file (``read_meta``) if it describes the present .idx, else None."""
    meta = read_meta(prefix)
    if meta is None or difference_from_files(meta, dtype, header, num_tokens):
        return None
    return meta if file_checksum(path_of(prefix, ".idx")) == meta["idx"]["xxh3_128"] else None


def file_checksum(path: Path, progress: Callable[[], object] = lambda: None) -> str:
    """Return the xxh3_128 of a file in hexadecimal; ``progress`` is called for every block."""
    with open_regular(path) as file:
        return stretch_checksum(file, file_identity(file).num_bytes, progress)


def stretch_checksum(
    file: io.FileIO, num_bytes: int, progress: Callable[[], object] = lambda: None
) -> str:
    """Return the xxh3_128 of the next ``num_bytes``; raise FormatError if the file is too short."""
    digest = xxhash.xxh3_128()
    for block in read_array_blocks(file, np.uint8, num_bytes, 1 << 20):
        digest.update(block.data)
        progress()
    return digest.hexdigest()


def has_its_checksums(prefix: str | os.PathLike[str]) -> bool:
    """Return whether .idx, .bin and columns have the sizes and checksums in the meta file; False
    without one. Raises FormatError if the meta file is damaged, and OSError for missing files."""
    meta = read_meta(prefix)
    if meta is None:
        return False
    for suffix, stretches in _checksums_of(meta).items():
        if path_of(prefix, suffix).stat().st_size != sum(size for size, _ in stretches):
            return False
    return damaged_file(prefix) is None


def _checksums_of(meta: Mapping[str, Any]) -> dict[str, list[Checksum]]:
    """Return the checksums of .idx, .bin and columns, by suffix."""
    idx = Checksum(meta["idx"]["bytes"], meta["idx"]["xxh3_128"])
    columns = {f".{name}.col": stretches_of(each) for name, each in meta.get(COLUMNS, {}).items()}
    return {".idx": [idx], ".bin": stretches_of(meta["bin"]), **columns}


def damaged_file(prefix: str | os.PathLike[str], most_bytes: float = math.inf) -> Path | None:
    """Return the first file of a dataset that does not have its recorded checksums, or None, also
    without a meta file. Reads only stretches that fit into ``most_bytes`` together. Raises
    FormatError if a file is too short, or the meta file is damaged."""
    meta = read_meta(prefix)
    for suffix, stretches in ({} if meta is None else _checksums_of(meta)).items():
        with open_regular(path_of(prefix, suffix)) as file:
            for size, digest in stretches:
                if size > most_bytes:
                    file.seek(size, os.SEEK_CUR)
                    continue
                most_bytes -= size
                if stretch_checksum(file, size) != digest:
                    return path_of(prefix, suffix)
    return None


SAMPLED_BLOCKS, SAMPLED_BYTES = 64, 1 << 14  # for ``sampled_checksum``: 1 MiB per file


def sampled_checksum(num_bytes: int, read: Callable[[int, int], bytes]) -> str:
    """Return the size of a file and a checksum of 64 evenly spaced blocks of 16 KiB (of all bytes
    of a file up to 1 MiB). ``read``: (begin, end) -> bytes."""
    size = min(num_bytes, SAMPLED_BYTES)
    begins = np.linspace(0, num_bytes - size, SAMPLED_BLOCKS).astype(np.int64).tolist()
    if num_bytes <= SAMPLED_BLOCKS * SAMPLED_BYTES:
        size, begins = num_bytes, [0]
    digest = xxhash.xxh3_128()
    for begin in begins:
        digest.update(read(begin, begin + size))
    return f"{num_bytes} bytes, sampled {digest.hexdigest()}"


def stretches_of(entry: Mapping[str, Any]) -> list[Checksum]:
    """Return the checksums in the entry of .bin or of a column."""
    lines = [line.split() for line in entry["xxh3_128"]]
    return [Checksum(int(size), digest) for size, digest in lines]


def difference_from_files(
    meta: Mapping[str, Any], dtype: str, header: IndexHeader, num_tokens: int
) -> str | None:
    """Return how a dataset's files differ from its meta file, None if they agree."""
    recorded = {**meta, "idx_bytes": meta["idx"]["bytes"]}
    actual = {"dtype": dtype, "num_sequences": header.num_sequences}
    actual |= {"num_documents": header.num_documents, "num_tokens": num_tokens}
    actual["idx_bytes"] = header.file_bytes
    for key, value in actual.items():
        if recorded[key] != value:
            return (
                f"the meta file does not match the dataset: its {key} is {recorded[key]}, but "
                f"that of the dataset is {value}; delete it if another tool rewrote the dataset"
            )
    return None


def _is_complete(content: dict[str, Any]) -> bool:
    try:
        idx, low, high, vocab_size = (content[key] for key in ("idx", *LIMITS))
        sizes = [size for size, _ in stretches_of(content["bin"])]
        largest = np.iinfo(pick_dtype(content["dtype"])).max
        return (
            content.keys() >= OWN_KEYS
            and all(_is_count(content[key]) for key in COUNTS)
            and all(content[key] is None or type(content[key]) is int for key in LIMITS)
            and all(content.get(key) is None or _is_count(content[key]) for key in BOUNDARY_TOKENS)
            and (low is None) == (high is None) == (content["num_tokens"] == 0)
            and (low is None or low <= high <= largest)
            and (vocab_size is None or max(0, high or 0) < vocab_size <= largest + 1)
            and min(sizes, default=1) > 0
            and sum(sizes) == content["bin"]["bytes"]
            and _is_count(idx["bytes"])
            and isinstance(idx["xxh3_128"], str)
            and all(
                sum(size for size, _ in stretches_of(entry)) == entry["bytes"]
                for entry in content.get(COLUMNS, {}).values()
            )
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
