"""Other tools' token files as datasets, without copying a token where the layout allows."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from megapack.errors import DataError, FormatError
from megapack.storage.atomic import AtomicFile, publish
from megapack.storage.builder import IndexedDatasetBuilder
from megapack.storage.foreign import Foreign, detect, open_foreign
from megapack.storage.index_writer import ArrayPart
from megapack.storage.meta import check_metadata, encode_meta, meta_path
from megapack.storage.mmididx import path_of, prefix_of
from megapack.storage.publishing import write_index_file
from megapack.storage.token_scan import scan_tokens
from megapack.storage.tokens import TokenLimits

__all__ = ["LINKS", "import_dataset"]

LINKS = ("auto", "hard", "symbolic", "copy")


def import_dataset(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    kind: str = "auto",
    dtype: DTypeLike | None = None,
    eod_token: int | None = None,
    eod_at: str | None = None,
    link: str = "auto",
    vocab_size: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> str:
    """Make a dataset of another tool's tokens.

    The .bin is a link to the source where that holds plain tokens from its first byte on; else
    tokens are copied. Documents keep their order and sequences. All tokens are read once, for
    their checksum and range.

    Args:
        source: file or prefix; may be ``<output>.bin`` itself, which then stays as it is.
        output: prefix of the dataset.
        kind: of the source (see ``foreign``); found out by default.
        dtype: of tokens in files that do not say it.
        eod_token: the id that ends a document, for files without an index.
        eod_at: ``"end"`` of a document, or ``"start"`` (the default for llm.c).
        link: ``"hard"``, ``"symbolic"``, ``"copy"``; auto: the first of these that is possible.
        vocab_size: number of token ids; larger ids are refused, and the number is written down.
        metadata: JSON-able facts for the meta file.

    Returns:
        What was done, for people.

    Raises:
        DataError, FormatError, ValueError: see ``open_foreign``.
        OSError: a file cannot be read, linked or written; nothing has the output's name then.
    """
    if link not in LINKS:
        raise ValueError(f"link is {link!r}; it is one of {', '.join(LINKS)}")
    output = prefix_of(output)
    kind = detect(source) if kind == "auto" else kind
    eod_at = ("start" if kind == "llm.c" else "end") if eod_at is None else eod_at
    if eod_at not in ("end", "start"):
        raise ValueError(f"eod_at is {eod_at!r}; it is 'end' or 'start'")
    foreign = open_foreign(source, kind, dtype=dtype, eod_token=eod_token, eod_at=eod_at)
    facts = {"imported_from": kind, **foreign.metadata, **(metadata or {})}
    check_metadata(facts)
    if foreign.pointers is not None:
        _rewrite(foreign, output, vocab_size, facts)
        how = "copied in order"
    else:
        how = _bring(foreign, output, vocab_size, link, facts)
    num_documents = foreign.lengths.size if foreign.ends is None else foreign.ends.size
    return (
        f"{output}: {num_documents} documents, {foreign.num_tokens} {foreign.dtype.name} tokens "
        f"({kind}, .bin {how})"
    )


def _bring(
    foreign: Foreign, output: str, vocab_size: int | None, link: str, metadata: dict[str, Any]
) -> str:
    """Write the index beside a link to, or a copy of, the tokens."""
    tokens = foreign.facts or scan_tokens(
        foreign.tokens_path, foreign.dtype, foreign.num_tokens, begin_byte=foreign.begin_byte
    )
    limits = TokenLimits(foreign.dtype, vocab_size, foreign.allow_negative)
    low, high = tokens.min_token_id, tokens.max_token_id
    if low is not None and high is not None and not limits.hold(low, high):
        raise DataError(
            f"{foreign.tokens_path} has ids from {low} to {high}, outside of {limits.describe()}"
        )
    part = ArrayPart(foreign.lengths, foreign.ends)
    idx, meta = AtomicFile(path_of(output, ".idx")), AtomicFile(meta_path(output))
    try:
        piece = write_index_file(idx, foreign.dtype, [part])
        meta.write(
            encode_meta(
                dtype=foreign.dtype.name,
                num_sequences=part.num_sequences,
                num_documents=part.num_documents,
                tokens=tokens,
                vocab_size=vocab_size,
                idx=piece,
                metadata=metadata,
            )
        )
        for file in (idx, meta):  # nothing but renames is left to fail behind the tokens
            file.sync()
        how = _place_tokens(foreign, path_of(output, ".bin"), link, idx.path)
        meta.path.unlink(missing_ok=True)
        publish(idx, meta)
    finally:
        idx.discard()
        meta.discard()
    return how


def _place_tokens(foreign: Foreign, target: Path, link: str, idx_path: Path) -> str:
    """Give the tokens their name; whoever looks finds the old dataset, none, or the new one."""
    source, plain = foreign.tokens_path, foreign.begin_byte == 0
    if target.exists() and target.samefile(source):
        if not plain:
            raise ValueError(f"{target} is the source and has a header; choose another output")
        return "as it was"
    if plain and link != "copy":
        temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
        how = _link(source, temporary, link)
        if how is not None:
            idx_path.unlink(missing_ok=True)
            temporary.replace(target)
            return how
    file = AtomicFile(target)
    try:
        with source.open("rb", buffering=0) as tokens:
            tokens.seek(foreign.begin_byte)
            file.copy_from(tokens, foreign.num_tokens * foreign.dtype.itemsize)
        file.sync()
        idx_path.unlink(missing_ok=True)
        publish(file)
    finally:
        file.discard()
    return "copied"


def _link(source: Path, temporary: Path, link: str) -> str | None:
    """Link as asked; auto: what the file systems allow, None when they allow nothing."""
    if link in ("auto", "hard"):
        try:
            os.link(source.resolve(), temporary)
            return "hard link"
        except OSError:
            if link == "hard":
                raise
    try:
        temporary.symlink_to(source.resolve())
        return "symbolic link"
    except OSError:
        if link == "symbolic":
            raise
    return None


def _rewrite(
    foreign: Foreign, output: str, vocab_size: int | None, metadata: dict[str, Any]
) -> None:
    """Copy sequences that are not stored in order."""
    assert foreign.pointers is not None
    width = foreign.dtype.itemsize
    size = foreign.tokens_path.stat().st_size // width
    tokens = np.memmap(foreign.tokens_path, foreign.dtype, "r", shape=(size,))
    begins, rest = np.divmod(foreign.pointers, width)
    if rest.any() or (begins < 0).any() or (begins + foreign.lengths > size).any():
        raise FormatError(f"{foreign.tokens_path}: sequences lie outside of the file")
    count = foreign.lengths.size
    ends = np.arange(1, count + 1) if foreign.ends is None else foreign.ends
    with IndexedDatasetBuilder(
        output,
        foreign.dtype,
        vocab_size=vocab_size,
        allow_negative=foreign.allow_negative,
        metadata=metadata,
    ) as builder:
        sequence = 0
        for end in ends.tolist():
            for begin, length in zip(
                begins[sequence:end].tolist(), foreign.lengths[sequence:end].tolist(), strict=True
            ):
                builder.add_item(tokens[begin : begin + length])
            builder.end_document()
            sequence = end
