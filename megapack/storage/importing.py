"""Other tools' token files as datasets, without copying a token where the layout allows.

- ``import_dataset``: from the file of another tool to a dataset
- ``KINDS``: what is understood; ``detect`` tells them apart; ``open_foreign``: documents of a file

===========  ==================================================================================
mmididx      .bin/.idx of Megatron, Megatron-DeepSpeed, GPT-NeoX or DeepSpeed, damaged or not
datatrove    ``<name>.ds`` with ``<name>.ds.index`` (uint64 document ends, in tokens)
llm.c        .bin with a header of 256 int32; documents begin with the end-of-text token
npy          a 1-D .npy; documents end with a token
flat         nothing but tokens (nanoGPT's .bin, OLMo's headerless .npy); documents end with one
===========  ==================================================================================

A file of five uint16 tokens 7 8 0 9 0 and the end-of-text token 0 ::

    import_dataset("train.bin", "train", dtype="uint16", eod_token=0)
    # -> "train: 2 documents, 5 uint16 tokens (flat, .bin as it was)": [7, 8, 0] and [9, 0]
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage.files import (
    AtomicFile,
    Publishable,
    create_temporary,
    identity_of,
    open_npy,
    open_regular,
    remove_leftovers,
)
from megapack.storage.index_file import MAGIC, Tokens, path_of, pick_dtype, prefix_of
from megapack.storage.index_writer import (
    MAX_SEQUENCE_LENGTH,
    ArrayLayout,
    DatasetContent,
    check_prefix,
    check_prefix_names,
    publish_dataset,
)
from megapack.storage.locks import WriterLock
from megapack.storage.metadata import TokenFacts, check_metadata, read_meta
from megapack.storage.remote.copies import local_output
from megapack.storage.survey import survey
from megapack.storage.tokens import (
    TokenLimits,
    TokenWriter,
    as_tokens,
    holds_weights,
    scan_tokens,
)

# First number of llm.c's header -> token type. Its uint32 ids are below 2^31: int32's bytes.
LLM_C_DTYPES: dict[int, np.dtype[Any]] = {
    20240520: np.dtype(np.uint16),
    20240801: np.dtype(np.int32),
}
_LLM_C_HEADER_BYTES = 1024
LINKS = ("auto", "hard", "symbolic", "copy")


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """Somebody else's documents."""

    tokens_path: Path
    dtype: np.dtype[Any]
    num_tokens: int
    layout: ArrayLayout | None = None  # None: to be found by the token that ends documents
    begin_byte: int = 0  # of the first token
    # Byte of every sequence in tokens_path, when they are not stored in order.
    pointers: NDArray[np.int64] | None = None
    facts: TokenFacts | None = None  # when the tokens had to be read anyway
    metadata: dict[str, Any] = field(default_factory=dict)
    # Negative values are labels; False where a negative id would be an unsigned one too large.
    allow_negative: bool = False


def detect(path: str | os.PathLike[str]) -> str:
    """The kind of a file or prefix, by what stands in it and beside it.

    Raises:
        FileNotFoundError: there is no such file.
        FormatError: it is no regular file.
    """
    idx_path = path_of(prefix_of(path), ".idx")
    if idx_path.is_file():
        with open_regular(idx_path) as file:
            if file.read(len(MAGIC)) == MAGIC:
                return "mmididx"
    if path_of(path, ".index").is_file():
        return "datatrove"
    with open_regular(path) as file:
        head = file.read(8)
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if len(head) == 8 and struct.unpack("<ii", head)[0] in LLM_C_DTYPES:
        return "llm.c"
    return "flat"


def open_foreign(
    path: str | os.PathLike[str],
    kind: str,
    *,
    dtype: DTypeLike | None = None,
    eod_token: int | None = None,
    eod_at: str = "end",
) -> Foreign:
    """Find the documents of a file.

    Args:
        path: file or prefix.
        kind: one of ``KINDS``.
        dtype: of the tokens, where the file does not say it.
        eod_token: the id that ends documents, for kinds without an index.
        eod_at: ``"end"`` of a document, or ``"start"`` where the token comes before it.

    Raises:
        FormatError: the file is damaged or not of that kind.
        DataError: the token that ends documents never occurs.
        ConfigError: an argument that this kind needs is missing, or contradicts what it says.
        OSError: a file cannot be read.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}; it is one of {', '.join(KINDS)}")
    found = KINDS[kind](Path(path), dtype)
    said = f"{path} is of kind {kind}, which says"
    if dtype is not None and _token_dtype(dtype) != found.dtype:
        raise ConfigError(f"{said} that its tokens are {found.dtype.name}: leave out --dtype")
    if found.layout is None:
        return _split(found, eod_token, eod_at)
    if eod_token is not None:
        raise ConfigError(
            f"{said} where documents end: leave out --eod-token, or give --kind flat to read it "
            "without its index"
        )
    return found


def _mmididx(path: Path, _: DTypeLike | None) -> Foreign:
    prefix = prefix_of(path)
    with contextlib.suppress(FormatError):  # another tool's file of that name
        if holds_weights(read_meta(prefix)):
            raise ConfigError(
                f"{prefix} holds loss weights, which stand beside the documents that they are of: "
                "copy its three files"
            )
    facts = survey(path_of(prefix, ".idx"), path_of(prefix, ".bin"))
    layout = facts.layout
    dtype, text = facts.meaning()
    if dtype is None:
        raise FormatError(f"{prefix}: dtype code {layout.header.dtype_code} means {text}")
    ends = None if layout.header.lacks_document_indices else layout.ends()
    return Foreign(
        tokens_path=facts.bin_path,
        dtype=dtype,
        num_tokens=facts.num_tokens,
        layout=ArrayLayout(layout.lengths(), ends),
        pointers=None if facts.widths else layout.pointers(),
        allow_negative=dtype.kind == "i",
    )


def _datatrove(path: Path, _: DTypeLike | None) -> Foreign:
    index_path = path_of(path, ".index")
    with open_regular(index_path) as index, open_regular(path) as tokens:
        ends_bytes, num_bytes = index.read(), identity_of(tokens).num_bytes
    if len(ends_bytes) % 8:
        raise FormatError(f"{index_path} has {len(ends_bytes)} bytes; it has 8 for each document")
    ends = np.frombuffer(ends_bytes, np.uint64).astype(np.int64)
    num_tokens = int(ends[-1]) if ends.size else 0
    width = num_bytes // num_tokens if num_tokens else 2
    if width not in (2, 4) or width * num_tokens != num_bytes:
        raise FormatError(
            f"{path} has {num_bytes} bytes, but {index_path.name} speaks of {num_tokens} tokens; "
            "they are 2 or 4 bytes wide"
        )
    lengths = np.diff(ends, prepend=0)
    if (lengths < 0).any():
        raise FormatError(f"{index_path}: document {int((lengths < 0).argmax())} ends too early")
    return Foreign(
        tokens_path=path,
        dtype=np.dtype(np.uint16 if width == 2 else np.int32),
        num_tokens=num_tokens,
        layout=ArrayLayout(_as_lengths(lengths)),
    )


def _llm_c(path: Path, _: DTypeLike | None) -> Foreign:
    with open_regular(path) as file:
        num_bytes, header = identity_of(file).num_bytes, np.fromfile(file, np.int32, 3)
    dtype = LLM_C_DTYPES.get(int(header[0])) if header.size == 3 else None
    if dtype is None:
        raise FormatError(f"{path} does not begin with the header of llm.c")
    num_tokens = int(header[2])
    if num_bytes != _LLM_C_HEADER_BYTES + num_tokens * dtype.itemsize:
        said = f"its header speaks of {num_tokens} tokens of {dtype.itemsize} bytes"
        raise FormatError(f"{path} has {num_bytes} bytes, and {said}: fetch or write it again")
    return Foreign(
        tokens_path=path, begin_byte=_LLM_C_HEADER_BYTES, dtype=dtype, num_tokens=num_tokens
    )


def _npy(path: Path, _: DTypeLike | None) -> Foreign:
    open_regular(path).close()
    array = open_npy(path)
    if array.ndim != 1:
        raise FormatError(f"{path} has shape {array.shape}; tokens are 1-D")
    dtype = _token_dtype(array.dtype)
    return Foreign(tokens_path=path, begin_byte=array.offset, dtype=dtype, num_tokens=array.size)


def _flat(path: Path, dtype: DTypeLike | None) -> Foreign:
    with open_regular(path) as file:
        num_bytes = identity_of(file).num_bytes
    if dtype is None:
        raise ConfigError(f"{path} has no header: say what its tokens are (--dtype uint16)")
    chosen = _token_dtype(dtype)
    num_tokens, rest = divmod(num_bytes, chosen.itemsize)
    if rest:
        raise FormatError(f"{path} does not hold a whole number of {chosen.name} tokens")
    return Foreign(tokens_path=path, dtype=chosen, num_tokens=num_tokens)


KINDS: dict[str, Callable[[Path, DTypeLike | None], Foreign]] = {
    "mmididx": _mmididx,
    "datatrove": _datatrove,
    "llm.c": _llm_c,
    "npy": _npy,
    "flat": _flat,
}


def _token_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Unsigned ids below the sign bit have the bytes of signed ones."""
    for unsigned, signed in ((np.uint32, np.int32), (np.uint64, np.int64)):
        if dtype == unsigned or dtype == np.dtype(unsigned).name:
            return np.dtype(signed)
    return pick_dtype(dtype)


def _as_lengths(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """As an .idx has them; DataError when one is too long."""
    longest = int(lengths.max(initial=0))
    if longest > MAX_SEQUENCE_LENGTH:
        raise DataError(
            f"a document has {longest} tokens; the format ends at {MAX_SEQUENCE_LENGTH}"
        )
    return lengths.astype(np.int32)


def _split(found: Foreign, eod_token: int | None, eod_at: str) -> Foreign:
    """The documents by the token that ends them, and what the meta file may promise of it."""
    path, num_tokens = found.tokens_path, found.num_tokens
    if eod_token is None:
        raise ConfigError(f"{path} has no index: say which id ends documents (--eod-token)")
    marked: list[NDArray[Any]] = [np.zeros(0, np.int64)]
    position = 0

    def look(block: Tokens, *_: int) -> None:
        nonlocal position
        marked.append(np.flatnonzero(block == eod_token) + position)
        position += block.size

    facts = scan_tokens(path, found.dtype, num_tokens, look, begin_byte=found.begin_byte)
    marks = np.concatenate(marked)
    if num_tokens and not marks.size:
        raise DataError(
            f"{path}: token id {eod_token} never occurs; is it the one that ends documents, "
            f"and are the tokens {found.dtype.name}?"
        )
    bounds = marks + 1 if eod_at == "end" else marks
    bounds = np.unique(np.concatenate([[0], bounds, [num_tokens]]))
    metadata: dict[str, Any] = {}
    if eod_at == "end" and marks.size and marks[-1] == num_tokens - 1:
        metadata["document_end_token"] = eod_token
    elif eod_at == "start" and marks.size and marks[0] == 0:
        metadata["document_begin_token"] = eod_token
    layout = ArrayLayout(_as_lengths(np.diff(bounds)))
    return replace(found, layout=layout, facts=facts, metadata=metadata)


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
        kind: of the file, one of ``KINDS``; found out by default.
        dtype, eod_token: see ``open_foreign``.
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
    if kind == "auto":
        kind = detect(path)
        if prefix_of(path) == output:  # in place: beside it may stand the .idx of an import before
            before = (read_meta(output) or {}).get("imported_from")
            kind = before if before in KINDS else kind
    eod_at = ("start" if kind == "llm.c" else "end") if eod_at is None else eod_at
    if eod_at not in ("end", "start"):
        raise ConfigError(f"eod_at is {eod_at!r}; it is 'end' or 'start'")
    with local_output(output, overwrite=overwrite) as target, WriterLock(target, what="import"):
        bin_path = path_of(target, ".bin")
        theirs = path_of(prefix_of(path), ".bin") if kind == "mmididx" else Path(path)
        stays = bin_path.exists() and bin_path.samefile(theirs)
        check_prefix_names(target, keeps_bin=stays)
        foreign = open_foreign(path, kind, dtype=dtype, eod_token=eod_token, eod_at=eod_at)
        if stays and foreign.begin_byte:
            raise ConfigError(f"{bin_path} is imported and has a header; choose another output")
        stays = stays and foreign.pointers is None
        facts = {"imported_from": kind, **foreign.metadata, **(metadata or {})}
        check_metadata(facts)
        limits = TokenLimits(foreign.dtype, vocab_size, foreign.allow_negative)
        layout, how = foreign.layout, "as it was"
        assert layout is not None
        bin_file: Publishable | None = None
        try:
            if foreign.pointers is None:
                tokens = _checked(foreign, limits)
            else:
                tokens, bin_file = _in_order(foreign, foreign.pointers, layout, bin_path, limits)
                how = "copied in order"
            content = DatasetContent(
                dtype=foreign.dtype,
                layouts=[layout],
                tokens=tokens,
                vocab_size=vocab_size,
                metadata=facts,
            )
            if not check_prefix(
                target,
                overwrite=overwrite,
                difference=lambda: content.difference_from(target),
                keeps_bin=stays,
            ):
                return f"nothing to do: {output} is there already"
            if bin_file is None and not stays:
                bin_file, how = _bring(foreign, bin_path, link)
            publish_dataset(target, content, bin_file)
        finally:
            if bin_file is not None:
                bin_file.discard()
    return (
        f"{output}: {layout.num_documents} documents, {foreign.num_tokens} "
        f"{foreign.dtype.name} tokens ({kind}, .bin {how})"
    )


def _checked(foreign: Foreign, limits: TokenLimits) -> TokenFacts:
    """Facts of the tokens; DataError when an id is outside of the limits."""
    path, begin = foreign.tokens_path, foreign.begin_byte
    tokens = foreign.facts or scan_tokens(path, foreign.dtype, foreign.num_tokens, begin_byte=begin)
    if tokens.token_range is not None and not limits.hold(*tokens.token_range):
        low, high = tokens.token_range
        bits = foreign.dtype.itemsize * 8
        also = f" ({low % 2**bits} as uint{bits})" if low < 0 else ""
        raise DataError(
            f"{path} has ids from {low}{also} to {high}, outside of {limits.describe()}"
        )
    return tokens


def _in_order(
    foreign: Foreign,
    pointers: NDArray[np.int64],
    layout: ArrayLayout,
    bin_path: Path,
    limits: TokenLimits,
) -> tuple[TokenFacts, AtomicFile]:
    """A copy of sequences that are not stored in order, without its name yet."""
    width = foreign.dtype.itemsize
    size = foreign.tokens_path.stat().st_size // width
    tokens = np.memmap(foreign.tokens_path, foreign.dtype, "r", shape=(size,))
    begins, rest = np.divmod(pointers, width)
    if rest.any() or (begins < 0).any() or (begins + layout.lengths > size).any():
        raise FormatError(f"{foreign.tokens_path}: sequences lie outside of the file")
    writer = TokenWriter(bin_path, limits)
    extents = zip(begins.tolist(), layout.lengths.tolist(), strict=True)
    for sequence, (begin, length) in enumerate(extents):
        writer.append(as_tokens(tokens[begin : begin + length]), first_document=sequence)
    return writer.finish(), writer.target


def _bring(foreign: Foreign, bin_path: Path, link: str) -> tuple[Publishable, str]:
    """A link to the tokens, or a copy of them, without its name yet."""
    tokens = foreign.tokens_path.resolve()
    ways: dict[str, tuple[str, Callable[[Path], None]]] = {
        "hard": ("hard link", lambda path: path.hardlink_to(tokens)),
        "symbolic": ("symbolic link", lambda path: path.symlink_to(tokens)),
    }
    for name, (how, make) in ways.items() if foreign.begin_byte == 0 else ():
        if link in ("auto", name):
            try:
                return _Link(bin_path, make), how
            except OSError:
                if link == name:
                    raise
    file = AtomicFile(bin_path)
    with open_regular(tokens) as source:
        source.seek(foreign.begin_byte)
        file.copy_from(source, foreign.num_tokens * foreign.dtype.itemsize)
    return file, "copied"


class _Link:
    """A link under a temporary name."""

    def __init__(self, path: Path, make: Callable[[Path], None]) -> None:
        self.path = path
        remove_leftovers(path)
        self.temporary, _ = create_temporary(path, make)

    def sync(self) -> None:
        """A link holds no data of its own."""

    def take_name(self) -> None:
        self.temporary.replace(self.path)

    def discard(self) -> None:
        self.temporary.unlink(missing_ok=True)
