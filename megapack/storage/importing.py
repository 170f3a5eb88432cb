"""Other tools' token files as datasets, without copying a token where the layout allows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage.atomic import (
    AtomicFile,
    Publishable,
    remove_leftovers,
    temporary_name,
)
from megapack.storage.foreign import Foreign, detect, open_foreign, tokens_path
from megapack.storage.lock import WriterLock
from megapack.storage.meta import TokenFacts, check_metadata
from megapack.storage.mmididx import path_of, prefix_of
from megapack.storage.opening import open_regular
from megapack.storage.publishing import (
    DatasetContent,
    check_prefix,
    check_prefix_names,
    publish_dataset,
)
from megapack.storage.remote.copies import local_output
from megapack.storage.token_writer import TokenWriter
from megapack.storage.tokens import TokenLimits, as_tokens, scan_tokens

__all__ = ["LINKS", "import_dataset"]

LINKS = ("auto", "hard", "symbolic", "copy")


def import_dataset(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    kind: str = "auto",
    dtype: DTypeLike | None = None,
    eod_token: int | None = None,
    eod_at: str | None = None,
    link: str = "auto",
    vocab_size: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> str:
    """Make a dataset of another tool's tokens.

    The .bin is a link to the file where that holds plain tokens from its first byte on; else
    tokens are copied. Documents keep their order and sequences. All tokens are read once, for
    their checksum and range.

    Args:
        path: file or prefix; may be ``<output>.bin`` itself, which then stays as it is.
        output: prefix of the dataset; at an address it is uploaded when it is complete.
        kind: of the file (see ``foreign``); found out by default.
        dtype: of tokens in files that do not say it.
        eod_token: the id that ends a document, for files without an index.
        eod_at: ``"end"`` of a document, or ``"start"`` (the default for llm.c).
        link: ``"hard"``, ``"symbolic"``, ``"copy"``; auto: the first of these that is possible.
        vocab_size: number of token ids; larger ids are refused, and the number is written down.
        metadata: JSON-able facts for the meta file.
        overwrite: replace another dataset that stands at ``output``.

    Returns:
        What was done, for people. When the same dataset stands there already, nothing is.

    Raises:
        ConfigError: another dataset stands at ``output``, or its files cannot be written there.
        LockedError: another process writes ``output``.
        DataError, FormatError, ConfigError: see ``open_foreign``.
        OSError: a file cannot be read, linked or written; nothing has the output's name then.
    """
    if link not in LINKS:
        raise ConfigError(f"link is {link!r}; it is one of {', '.join(LINKS)}")
    output = prefix_of(output)
    kind = detect(path) if kind == "auto" else kind
    eod_at = ("start" if kind == "llm.c" else "end") if eod_at is None else eod_at
    if eod_at not in ("end", "start"):
        raise ConfigError(f"eod_at is {eod_at!r}; it is 'end' or 'start'")
    with local_output(output, overwrite=overwrite) as target, WriterLock(target, what="import"):
        bin_path = path_of(target, ".bin")
        in_place = _is_same(bin_path, tokens_path(path, kind))
        check_prefix_names(target, keeps_bin=in_place)
        foreign = open_foreign(path, kind, dtype=dtype, eod_token=eod_token, eod_at=eod_at)
        if in_place and foreign.begin_byte:
            raise ConfigError(f"{bin_path} is imported and has a header; choose another output")
        facts = {"imported_from": kind, **foreign.metadata, **(metadata or {})}
        check_metadata(facts)
        limits = TokenLimits(foreign.dtype, vocab_size, foreign.allow_negative)
        how = _import(foreign, target, limits, link=link, metadata=facts, overwrite=overwrite)
    if how is None:
        return f"nothing to do: {output} is there already"
    layout = foreign.layout
    return (
        f"{output}: {layout.num_documents} documents, {layout.num_tokens} "
        f"{foreign.dtype.name} tokens ({kind}, .bin {how})"
    )


def _is_same(bin_path: Path, foreign: Path) -> bool:
    return bin_path.exists() and bin_path.samefile(foreign)


def _import(
    foreign: Foreign,
    output: str,
    limits: TokenLimits,
    *,
    link: str,
    metadata: dict[str, Any],
    overwrite: bool,
) -> str | None:
    """Write the index beside a link to, or a copy of, the tokens; how .bin got them."""
    bin_path = path_of(output, ".bin")
    bin_file: Publishable | None = None
    in_place = foreign.pointers is None and _is_same(bin_path, foreign.tokens_path)
    try:
        if foreign.pointers is not None:
            tokens, bin_file = _in_order(foreign, bin_path, limits)
        else:
            tokens = _checked(foreign, limits)
        content = DatasetContent(
            dtype=foreign.dtype,
            layouts=[foreign.layout],
            tokens=tokens,
            vocab_size=limits.vocab_size,
            metadata=metadata,
        )
        if not check_prefix(
            output,
            overwrite=overwrite,
            difference=lambda: content.difference_from(output),
            keeps_bin=in_place,
        ):
            return None
        how = "copied in order" if bin_file else "as it was"
        if bin_file is None and not in_place:
            bin_file, how = _bring(foreign, bin_path, link)
        publish_dataset(output, content, bin_file)
        return how
    finally:
        if bin_file is not None:
            bin_file.discard()


def _checked(foreign: Foreign, limits: TokenLimits) -> TokenFacts:
    """What the tokens are; DataError when an id is outside of the limits."""
    tokens = foreign.facts or scan_tokens(
        foreign.tokens_path, foreign.dtype, foreign.layout.num_tokens, begin_byte=foreign.begin_byte
    )
    if tokens.token_range is not None and not limits.hold(*tokens.token_range):
        low, high = tokens.token_range
        raise DataError(
            f"{foreign.tokens_path} has ids from {low} to {high}, outside of {limits.describe()}"
        )
    return tokens


def _bring(foreign: Foreign, bin_path: Path, link: str) -> tuple[Publishable, str]:
    """A link to the tokens, or a copy of them, without its name yet."""
    if foreign.begin_byte == 0 and link != "copy":
        found = _Link.make(foreign.tokens_path, bin_path, link)
        if found is not None:
            return found
    file = AtomicFile(bin_path)
    with open_regular(foreign.tokens_path) as tokens:
        tokens.seek(foreign.begin_byte)
        file.copy_from(tokens, foreign.layout.num_tokens * foreign.dtype.itemsize)
    return file, "copied"


class _Link:
    """A link under a temporary name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        remove_leftovers(path)
        self.temporary = temporary_name(path)

    @staticmethod
    def make(tokens: Path, path: Path, link: str) -> tuple[_Link, str] | None:
        """As asked; auto: what the file systems allow, None when they allow nothing."""
        result = _Link(path)
        if link in ("auto", "hard"):
            try:
                os.link(tokens.resolve(), result.temporary)
                return result, "hard link"
            except OSError:
                if link == "hard":
                    raise
        try:
            result.temporary.symlink_to(tokens.resolve())
            return result, "symbolic link"
        except OSError:
            if link == "symbolic":
                raise
        return None

    def sync(self) -> None:
        """A link holds no data of its own."""

    def take_name(self) -> None:
        self.temporary.replace(self.path)

    def discard(self) -> None:
        self.temporary.unlink(missing_ok=True)


def _in_order(
    foreign: Foreign, bin_path: Path, limits: TokenLimits
) -> tuple[TokenFacts, AtomicFile]:
    """A copy of sequences that are not stored in order, without its name yet."""
    assert foreign.pointers is not None
    width = foreign.dtype.itemsize
    size = foreign.tokens_path.stat().st_size // width
    tokens = np.memmap(foreign.tokens_path, foreign.dtype, "r", shape=(size,))
    begins, rest = np.divmod(foreign.pointers, width)
    if rest.any() or (begins < 0).any() or (begins + foreign.layout.lengths > size).any():
        raise FormatError(f"{foreign.tokens_path}: sequences lie outside of the file")
    writer = TokenWriter(bin_path, limits)
    extents = zip(begins.tolist(), foreign.layout.lengths.tolist(), strict=True)
    for sequence, (begin, length) in enumerate(extents):
        writer.append(as_tokens(tokens[begin : begin + length]), first_document=sequence)
    return writer.finish(), writer.target
