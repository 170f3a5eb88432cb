"""Verify that datasets are complete, consistent, and equal to their recorded checksums.

- ``verify``: all ``Finding``s about one dataset (``Survey.findings``: those about its index)
- ``find_duplicates``: datasets with the same documents
- ``leftovers``: temporary files of killed writers

A .bin with two bytes after the last sequence of the .idx::

    verify("corpus")
    # -> [Finding("warning", "trailing-bin", "corpus.bin has 2 bytes after the last sequence",
    #             "megapack-build repair --drop-trailing")]
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack.errors import FormatError
from megapack.storage.address import is_remote
from megapack.storage.columns import ColumnEntry, column_entries, column_path
from megapack.storage.files import file_identity, is_being_written, open_regular, temporary_files
from megapack.storage.index_file import COMPANIONS, MAGIC, IndexFile, Tokens, path_of, prefix_of
from megapack.storage.metadata import (
    Checksum,
    difference_from_files,
    file_checksum,
    joined_range,
    meta_path,
    meta_remedy,
    read_meta,
    stretch_checksum,
    stretches_of,
)
from megapack.storage.remote.client import find_object
from megapack.storage.remote.copies import local_copy
from megapack.storage.remote.reader import open_remote_pair
from megapack.storage.survey import REPAIR, Finding, Survey, has_errors, survey
from megapack.storage.tokens import scan_tokens

__all__ = ["Finding", "find_duplicates", "has_errors", "leftovers", "verify"]

Progress: TypeAlias = Callable[[int, int], None]
RESTORE = "restore .bin from a copy or build it again"
DATASET = (
    rf"({'|'.join(map(re.escape, COMPANIONS))})?\.(bin|idx|meta\.json|samples|[a-z][a-z0-9_]*\.col)"
)


class TokenChecks(NamedTuple):
    """Rules for tokens; a rule that is None is not checked."""

    vocab_size: int | None
    allow_negative: bool
    document_begin_token: int | None
    document_end_token: int | None


def check_tokens(
    prefix: str,
    dtype: np.dtype[Any],
    checks: TokenChecks,
    meta: dict[str, Any] | None,
    progress: Progress | None = None,
) -> list[Finding]:
    """Read and check all tokens of a dataset with a valid index; ``meta`` is its matching meta
    file. Needs 8 bytes of memory per document, and 8 more per rule about begin or end tokens."""
    reader = _Reader(prefix, dtype, checks)
    total = int(reader.offsets[-1]) * dtype.itemsize
    stretches = [Checksum(total, "")] if meta is None else stretches_of(meta["bin"])
    ranges: list[tuple[int, int] | None] = []
    begin = 0

    def look(block: Tokens, low: int, high: int) -> None:
        reader.read(block, low, high)
        if progress is not None:
            progress(reader.num_tokens * dtype.itemsize, total)

    for num_bytes, expected in stretches:
        facts = scan_tokens(
            path_of(prefix, ".bin"), dtype, num_bytes // dtype.itemsize, look, begin_byte=begin
        )
        ranges.append(facts.token_range)
        if expected and facts.checksums[0].xxh3_128 != expected:
            reader.add_checksum_error(begin, begin + num_bytes)
        begin += num_bytes
    return [*reader.findings(), *_ranges(joined_range(ranges), checks, meta)]


class _Reader:
    """Collector of the first violation of each kind in consecutive blocks of tokens."""

    def __init__(self, prefix: str, dtype: np.dtype[Any], checks: TokenChecks) -> None:
        index = IndexFile(path_of(prefix, ".idx"))
        self.offsets = index.document_offsets(dtype.itemsize)
        self.num_tokens = 0  # read so far
        self._itemsize, self._checks = dtype.itemsize, checks
        self._first: dict[str, str] = {}
        self._count: dict[str, int] = {}
        filled = self.offsets[:-1] < self.offsets[1:]
        if checks.document_begin_token is not None:
            self._begins = self.offsets[:-1][filled]
        if checks.document_end_token is not None:
            self._ends = self.offsets[1:][filled] - 1

    def read(self, tokens: Tokens, low: int, high: int) -> None:
        limit = self._checks.vocab_size
        if low < 0 and not self._checks.allow_negative:
            self._add("negative-id", np.flatnonzero(tokens < 0), tokens)
        if limit is not None and high >= limit:
            self._add("id-beyond-vocabulary", np.flatnonzero(tokens >= limit), tokens)
        ends, begins = self._checks.document_end_token, self._checks.document_begin_token
        if ends is not None:
            self._compare("document-end", self._ends, ends, tokens)
        if begins is not None:
            self._compare("document-begin", self._begins, begins, tokens)
        self.num_tokens += tokens.size

    def _compare(self, code: str, positions: NDArray[Any], wanted: int, tokens: Tokens) -> None:
        bounds = np.searchsorted(positions, [self.num_tokens, self.num_tokens + tokens.size])
        in_block = positions[bounds[0] : bounds[1]] - self.num_tokens
        self._add(code, in_block[tokens[in_block] != wanted], tokens)

    def _add(self, code: str, where: NDArray[Any], tokens: Tokens) -> None:
        if where.size == 0:
            return
        self._count[code] = self._count.get(code, 0) + where.size
        if code not in self._first:
            position = self.num_tokens + int(where[0])
            document = int(np.searchsorted(self.offsets, position, side="right")) - 1
            inside = position - int(self.offsets[document])
            self._first[code] = (
                f"document {document}, position {inside}: token id {tokens[where[0]]}"
            )

    def add_checksum_error(self, begin: int, end: int) -> None:
        self._count["checksum"] = self._count.get("checksum", 0) + 1
        bounds = np.array([begin, end - 1]) // self._itemsize
        first, last = np.searchsorted(self.offsets, bounds, side="right") - 1
        self._first.setdefault(
            "checksum", f"bytes {begin} to {end} of .bin (documents {first} to {last})"
        )

    def findings(self) -> Iterator[Finding]:
        checks = self._checks
        for code, text, remedy in (
            ("checksum", "do not have the checksum of the meta file", RESTORE),
            ("negative-id", "is negative", "build it with allow_negative=True"),
            ("id-beyond-vocabulary", f"is not below vocab_size {checks.vocab_size}", RESTORE),
            ("document-end", f"should be the last, {checks.document_end_token}", ""),
            ("document-begin", f"should be the first, {checks.document_begin_token}", ""),
        ):
            if code in self._first:
                more = self._count[code] - 1
                also = f" (and {more} more)" if more else ""
                yield Finding("error", code, f"{self._first[code]} {text}{also}", remedy)


def _ranges(
    known: tuple[int, int] | None, checks: TokenChecks, meta: dict[str, Any] | None
) -> Iterator[Finding]:
    if known is None:
        return
    low, high = known
    if low < 0 and checks.allow_negative:
        text = f"ids are {low} to {high}: labels, not tokens"
        yield Finding("note", "negative-ids", text)
    recorded = None if meta is None else (meta["min_token_id"], meta["max_token_id"])
    if recorded is not None and recorded != (low, high):
        text = f"token ids are {low} to {high}; the meta file has {recorded[0]} to {recorded[1]}"
        yield Finding("error", "token-range", text, RESTORE)


def verify(
    prefix: str | os.PathLike[str],
    *,
    tokens: bool = True,
    vocab_size: int | None = None,
    document_end_token: int | None = None,
    progress: Progress | None = None,
) -> list[Finding]:
    """Run all checks on one dataset; return all findings. The dataset is valid if none is an error.

    With ``tokens``, also read .bin and all columns (fetch them whole if they are remote), and check
    their checksums, the range of ids, and the first and last token of every document: all ids must
    be below ``vocab_size``, and ``document_end_token`` the last token of every non-empty document
    (both by default from the meta file). ``progress`` is called with (bytes read, all bytes) of
    .bin and columns. Raises OSError if a file exists but cannot be read.
    """
    prefix = prefix_of(prefix)
    if is_remote(prefix):
        try:
            with local_copy(prefix, tokens=tokens) as files:
                limits = {"vocab_size": vocab_size, "document_end_token": document_end_token}
                findings = verify(files, tokens=tokens, progress=progress, **limits)
                return [_of_address(finding, files, prefix) for finding in findings]
        except FileNotFoundError as error:
            return [Finding("error", "missing", str(error))]
        except FormatError as error:
            return [Finding("error", "damaged", str(error), "upload it again")]
    idx_path, bin_path = path_of(prefix, ".idx"), path_of(prefix, ".bin")
    findings = [*leftovers(Path(prefix), DATASET)]
    for path in (idx_path, bin_path):
        if not path.exists():
            findings.append(Finding("error", "missing", f"{path} does not exist"))
    if has_errors(findings):
        return findings
    try:
        facts = survey(idx_path, bin_path)
    except FormatError as error:
        remedy = ""
        with contextlib.suppress(FormatError), open_regular(idx_path) as file:
            remedy = REPAIR if file.read(len(MAGIC)) == MAGIC else ""
        return [*findings, Finding("error", "index", str(error), remedy)]
    findings += facts.findings()
    meta, stale = _meta(prefix, facts)
    findings += stale
    findings += check_column_files(prefix, meta)
    columns = _column_entries(prefix, meta)
    dtype = facts.declared_dtype
    is_readable = not has_errors(each for each in findings if each.code != "column")
    if tokens and dtype is not None and is_readable:
        recorded = meta or {}
        if document_end_token is None:
            document_end_token = recorded.get("document_end_token")
        checks = TokenChecks(
            vocab_size=recorded.get("vocab_size") if vocab_size is None else vocab_size,
            allow_negative=(recorded.get("min_token_id") or 0) < 0,
            document_begin_token=recorded.get("document_begin_token"),
            document_end_token=document_end_token,
        )
        num_column_bytes = sum(entry.bytes for entry in columns.values())
        findings += check_tokens(
            prefix, dtype, checks, meta, _with_total(progress, 0, num_column_bytes)
        )
        report = _with_total(progress, facts.num_tokens * dtype.itemsize, 0)
        findings += check_column_bytes(prefix, columns, dtype.itemsize, report)
    return findings


def _with_total(progress: Progress | None, before: int, after: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(before + done, before + total + after)


# ---- Columns -------------------------------------------------------------------------------------


def _column_entries(prefix: str, meta: dict[str, Any] | None) -> dict[str, ColumnEntry]:
    """Return the columns that exist with the size in the meta file; see ``check_column_files``."""
    try:
        entries = column_entries(meta, meta_path(prefix))
    except FormatError:
        return {}
    sizes = {name: _size(column_path(prefix, name)) for name in entries}
    return {name: entry for name, entry in entries.items() if sizes[name] == entry.bytes}


def check_column_files(prefix: str, meta: dict[str, Any] | None) -> Iterator[Finding]:
    """Yield findings about damaged entries, and missing, short, long and unlisted .col files."""
    try:
        entries = column_entries(meta, meta_path(prefix))
    except FormatError as error:
        yield Finding("error", "column", str(error))
        return
    for name, entry in entries.items():
        path = column_path(prefix, name)
        num_bytes = _size(path)
        text = f"{path} has {num_bytes} bytes; the meta file says {entry.bytes}"
        if num_bytes is None:
            text = f"{path} does not exist, but the meta file lists column {name}"
        if num_bytes != entry.bytes:
            option = "--drop-trailing" if (num_bytes or 0) > entry.bytes else "--drop-columns"
            yield Finding("error", "column", text, f"{REPAIR} {option}, or restore it from a copy")
    folder, base = Path(prefix).parent, Path(prefix).name
    for path in sorted(folder.glob(f"{glob.escape(base)}.*.col")):
        name = path.name[len(base) + 1 : -len(".col")]
        if meta is not None and name not in entries and "." not in name:
            text = f"{path} is not a column of the dataset: {meta_path(base)} does not list it"
            yield Finding("note", "unlisted-column", text, "delete it, or add it again")


def _size(path: Path) -> int | None:
    try:
        with open_regular(path) as file:
            return file_identity(file).num_bytes
    except (FileNotFoundError, FormatError):
        return None


def check_column_bytes(
    prefix: str, columns: Mapping[str, ColumnEntry], token_bytes: int, progress: Progress | None
) -> Iterator[Finding]:
    """Read all columns; yield a finding for each that does not have its checksums."""
    total = sum(entry.bytes for entry in columns.values())
    done = 0

    def report() -> None:
        nonlocal done
        done += 1 << 20
        if progress is not None:
            progress(min(done, total), total)

    for name, entry in columns.items():
        damaged: list[tuple[int, int]] = []
        begin = 0
        with open_regular(column_path(prefix, name)) as file:
            for num_bytes, expected in entry.checksums:
                if stretch_checksum(file, num_bytes, report) != expected:
                    damaged.append((begin, begin + num_bytes))
                begin += num_bytes
        if damaged:
            offsets = IndexFile(path_of(prefix, ".idx")).document_offsets(token_bytes)
            rows = np.array([damaged[0][0], damaged[0][1] - 1]) // entry.spec.row_bytes
            first, last = np.searchsorted(offsets, rows, side="right") - 1
            also = f" (and {len(damaged) - 1} more)" if damaged[1:] else ""
            text = (
                f"bytes {damaged[0][0]} to {damaged[0][1]} of {column_path(prefix, name)} "
                f"(documents {first} to {last}) do not have the checksum of the meta file{also}"
            )
            remedy = "restore it from a copy, or write the column again"
            yield Finding("error", "column-checksum", text, remedy)


def _of_address(finding: Finding, files: str, prefix: str) -> Finding:
    """Rewrite a finding about a local copy for its address, where repair is not possible."""
    remedy = finding.remedy
    if remedy.startswith(REPAIR):
        remedy = f"{remedy} on a local copy, then upload it again"
    return replace(finding, message=finding.message.replace(files, prefix), remedy=remedy)


def find_duplicates(prefixes: Sequence[str | os.PathLike[str]]) -> dict[str, Finding]:
    """Return a finding per dataset with the same documents as an earlier one: the same .bin under
    two names, equal .idx files and equal first and last 64 KiB of .bin, or remote objects with
    equal checksums or versions."""
    first_with: dict[Any, str] = {}
    findings = {}
    for prefix in map(prefix_of, prefixes):
        for identity in _identities(prefix):
            other = first_with.setdefault(identity, prefix)
            if other != prefix:
                text = f"{prefix} contains the same documents as {other}"
                findings[prefix] = Finding("warning", "duplicate", text)
                break
    return findings


def leftovers(base: Path, suffixes: str = "") -> Iterator[Finding]:
    """Yield findings about temporary files for ``base``, of running or killed writers. With
    ``suffixes``, a regular expression, ``base`` is the common prefix of several files."""
    wanted = re.compile(re.escape(base.name) + suffixes)
    for name, path in temporary_files(base.parent) if base.parent.is_dir() else ():
        if wanted.fullmatch(name) is None:
            continue
        if is_being_written(path):
            yield Finding("note", "being-written", f"{path} is being written")
        elif path.exists():
            text = f"{path} ({path.stat().st_size:,} bytes) was left by a process that was killed"
            yield Finding("note", "leftover", text, "delete it, or write its dataset again")


def _meta(prefix: str, facts: Survey) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Return the meta file if it describes these files, and findings about it."""
    try:
        meta = read_meta(prefix)
    except FormatError as error:
        return None, [Finding("error", "meta", str(error))]
    if meta is None:
        text = "no meta file: checksums, tokenizer and vocabulary are unknown"
        return None, [Finding("note", "no-meta", text)]
    if file_checksum(facts.layout.path) != meta["idx"]["xxh3_128"]:
        text = f"{facts.layout.path} does not have the checksum of the meta file"
        remedy = "restore it from a copy, or delete the meta file if the dataset was rewritten"
        return None, [Finding("error", "checksum", text, remedy)]
    width, header = facts.width or 1, facts.layout.header
    declared = facts.declared_dtype
    dtype = meta["dtype"] if declared is None else declared.name
    difference = difference_from_files(meta, dtype, header, facts.num_tokens)
    if difference is not None:
        return None, [Finding("error", "meta", f"{prefix}: {difference}")]
    sizes = [size for size, _ in stretches_of(meta["bin"])]
    if sum(sizes) != facts.num_tokens * width or any(size % width for size in sizes):
        text = "the meta file's checksums belong to another .bin"
        return None, [Finding("error", "meta", text, meta_remedy(prefix))]
    return meta, []


def _identities(prefix: str) -> Iterator[Any]:
    """Yield keys for a dataset; datasets that have a key in common are equal."""
    if is_remote(prefix):
        with contextlib.suppress(FormatError, FileNotFoundError):  # verify reports these
            sums = open_remote_pair(prefix).checksums
            if sums is not None:
                tokens = sums.blocks[".bin"]
                blocks = xxhash.xxh3_128_hexdigest(tokens.digests.tobytes())
                yield "blocks", tokens.num_bytes, blocks, sums.files[".idx"]
        objects = [find_object(f"{prefix}{suffix}") for suffix in (".idx", ".bin")]
        versions = [each.version for each in objects if each is not None and each.etag]
        if len(versions) == len(objects) and not prefix.startswith("http"):  # tags are per URL
            yield "objects", *versions
        return
    idx_path, bin_path = path_of(prefix, ".idx"), path_of(prefix, ".bin")
    if not (idx_path.is_file() and bin_path.is_file()):
        return
    digest = xxhash.xxh3_128(file_checksum(idx_path).encode())
    with open_regular(bin_path) as file:
        identity = file_identity(file)
        if identity.num_bytes == 0:
            return
        yield "inode", identity.device, identity.inode
        digest.update(file.read(1 << 16))
        file.seek(max(0, identity.num_bytes - (1 << 16)))
        digest.update(file.read())
    yield "content", digest.hexdigest()
