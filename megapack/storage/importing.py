"""Other tools' token files as datasets, without copying a token where the layout allows."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage.files import (
    AtomicFile,
    Publishable,
    WriterLock,
    identity_of,
    open_regular,
    remove_leftovers,
    temporary_name,
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
from megapack.storage.metadata import TokenFacts, check_metadata
from megapack.storage.remote.copies import local_output
from megapack.storage.survey import LEGACY_MAGIC, meaning_of, survey
from megapack.storage.tokens import TokenLimits, TokenWriter, as_tokens, scan_tokens

# ---- Files of tokens without an index, whose documents end (or begin) with a token --------------

PLAIN_KINDS = ("llm.c", "npy", "flat")
# First number of llm.c's header -> token type. Its uint32 ids are below 2^31: int32's bytes.
LLM_C_DTYPES: dict[int, np.dtype[Any]] = {
    20240520: np.dtype(np.uint16),
    20240801: np.dtype(np.int32),
}
_LLM_C_HEADER_BYTES = 1024


@dataclass(frozen=True)
class PlainTokens:
    """Where the tokens of a file lie."""

    path: Path
    begin_byte: int
    dtype: np.dtype[Any]
    num_tokens: int


def open_plain(path: Path, kind: str, dtype: DTypeLike | None) -> PlainTokens:
    """Find the tokens of a file of one of ``PLAIN_KINDS``.

    Raises:
        FormatError: it is not of that kind, or damaged.
        ConfigError: dtype is needed (``flat``) or no token type.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        num_bytes = identity_of(file).num_bytes
        if kind == "llm.c":
            return _open_llm_c(path, file)
    if kind == "npy":
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.ndim != 1:
            raise FormatError(f"{path} has shape {array.shape}; tokens are 1-D")
        return PlainTokens(path, array.offset, _token_dtype(array.dtype), array.size)
    if dtype is None:
        raise ConfigError(f"{path} has no header: say what its tokens are (--dtype uint16)")
    chosen = _token_dtype(dtype)
    num_tokens, rest = divmod(num_bytes, chosen.itemsize)
    if rest:
        raise FormatError(f"{path} does not hold a whole number of {chosen.name} tokens")
    return PlainTokens(path, 0, chosen, num_tokens)


def split_documents(
    plain: PlainTokens, eod_token: int | None, eod_at: str
) -> tuple[NDArray[np.int32], TokenFacts, dict[str, Any]]:
    """Lengths of the documents, what the tokens are, and what the meta file may promise.

    Raises:
        ConfigError: eod_token is missing.
        DataError: it never occurs, or a document is too long.
    """
    if eod_token is None:
        raise ConfigError(f"{plain.path} has no index: say which id ends documents (--eod-token)")
    found: list[NDArray[Any]] = [np.zeros(0, np.int64)]
    position = 0

    def look(block: Tokens, *_: int) -> None:
        nonlocal position
        found.append(np.flatnonzero(block == eod_token) + position)
        position += block.size

    begin = plain.begin_byte
    facts = scan_tokens(plain.path, plain.dtype, plain.num_tokens, look, begin_byte=begin)
    marks = np.concatenate(found)
    if plain.num_tokens and not marks.size:
        raise DataError(
            f"{plain.path}: token id {eod_token} never occurs; is it the one that ends documents, "
            f"and are the tokens {plain.dtype.name}?"
        )
    bounds = marks + 1 if eod_at == "end" else marks
    bounds = np.unique(np.concatenate([[0], bounds, [plain.num_tokens]]))
    metadata: dict[str, Any] = {}
    if eod_at == "end" and marks.size and marks[-1] == plain.num_tokens - 1:
        metadata["document_end_token"] = eod_token
    elif eod_at == "start" and marks.size and marks[0] == 0:
        metadata["document_begin_token"] = eod_token
    return as_lengths(np.diff(bounds), "a document"), facts, metadata


def as_lengths(lengths: NDArray[np.int64], what: str) -> NDArray[np.int32]:
    """Lengths as an .idx has them; DataError when one is too long."""
    longest = int(lengths.max(initial=0))
    if longest > MAX_SEQUENCE_LENGTH:
        raise DataError(f"{what} has {longest} tokens; the format ends at {MAX_SEQUENCE_LENGTH}")
    return lengths.astype(np.int32)


def _open_llm_c(path: Path, file: io.FileIO) -> PlainTokens:
    header = np.fromfile(file, np.int32, 3)
    dtype = LLM_C_DTYPES.get(int(header[0])) if header.size == 3 else None
    if dtype is None:
        raise FormatError(f"{path} does not begin with the header of llm.c")
    num_tokens = int(header[2])
    if (
        num_tokens < 0
        or identity_of(file).num_bytes < _LLM_C_HEADER_BYTES + num_tokens * dtype.itemsize
    ):
        raise FormatError(f"{path} is truncated: its header promises {num_tokens} tokens")
    return PlainTokens(path, _LLM_C_HEADER_BYTES, dtype, num_tokens)


def _token_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Unsigned ids below the sign bit have the bytes of signed ones."""
    for unsigned, signed in ((np.uint32, np.int32), (np.uint64, np.int64)):
        if dtype == unsigned or dtype == np.dtype(unsigned).name:
            return np.dtype(signed)
    return pick_dtype(dtype)


# ---- Token files of other tools: where their tokens lie and where documents begin ---------------
# ===========  ==================================================================================
# mmididx      .bin/.idx of Megatron, Megatron-DeepSpeed, GPT-NeoX or DeepSpeed, damaged or not
# tntidx       .bin/.idx of the format before it (``--data-impl lazy`` and ``cached``)
# datatrove    ``<name>.ds`` with ``<name>.ds.index`` (uint64 document ends, in tokens)
# llm.c        .bin with a header of 256 int32; documents begin with the end-of-text token
# npy          a 1-D .npy; documents end with a token
# flat         nothing but tokens (nanoGPT's .bin, OLMo's headerless .npy); documents end with one
# ===========  ==================================================================================


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """Somebody else's documents."""

    tokens_path: Path
    dtype: np.dtype[Any]
    layout: ArrayLayout
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
    path = Path(path)
    idx_path = path_of(prefix_of(path), ".idx")
    if idx_path.is_file():
        with open_regular(idx_path) as file:
            magic = file.read(len(MAGIC))
        if magic == MAGIC:
            return "mmididx"
        if magic.startswith(LEGACY_MAGIC):
            return "tntidx"
    if path_of(path, ".index").is_file():
        return "datatrove"
    with open_regular(path) as file:
        head = file.read(8)
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if len(head) == 8 and struct.unpack("<ii", head)[0] in LLM_C_DTYPES:
        return "llm.c"
    return "flat"


def tokens_path(path: str | os.PathLike[str], kind: str) -> Path:
    """The file that holds the tokens."""
    is_pair = kind in ("mmididx", "tntidx")
    return path_of(prefix_of(path), ".bin") if is_pair else Path(path)


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
        ConfigError: an argument that this kind needs is missing.
        OSError: a file cannot be read.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}; it is one of {', '.join(KINDS)}")
    path = Path(path)
    if kind in _INDEXED:
        return _INDEXED[kind](path)
    plain = open_plain(path, kind, dtype)
    lengths, facts, metadata = split_documents(plain, eod_token, eod_at)
    return Foreign(
        tokens_path=path,
        begin_byte=plain.begin_byte,
        dtype=plain.dtype,
        layout=ArrayLayout(lengths),
        facts=facts,
        metadata=metadata,
    )


def _mmididx(path: Path) -> Foreign:
    prefix = prefix_of(path)
    facts = survey(path_of(prefix, ".idx"), path_of(prefix, ".bin"))
    layout = facts.layout
    dtype, text = facts.meaning()
    if dtype is None:
        raise FormatError(f"{prefix}: dtype code {layout.header.dtype_code} means {text}")
    ends = None if layout.header.lacks_document_indices else layout.ends()
    return Foreign(
        tokens_path=path_of(prefix, ".bin"),
        dtype=dtype,
        layout=ArrayLayout(layout.lengths(), ends),
        pointers=None if facts.widths else layout.pointers(),
        allow_negative=dtype.kind == "i",
    )


def _tntidx(path: Path) -> Foreign:
    prefix = prefix_of(path)
    idx_path, bin_path = path_of(prefix, ".idx"), path_of(prefix, ".bin")
    with open_regular(idx_path) as file:
        head = file.read(56)
        if len(head) < 56:
            raise FormatError(f"{idx_path} is truncated: its header has 56 bytes")
        _, code, width, num_items, num_sizes, num_indices = struct.unpack_from("<QQQQQQ", head, 8)
        counts = [num_items + 1, num_items + 1, num_sizes, num_indices]
        if identity_of(file).num_bytes < 56 + 8 * sum(counts):
            raise FormatError(f"{idx_path} is truncated")
        dims, offsets, sizes, indices = (np.fromfile(file, np.int64, n) for n in counts)
    if num_sizes != num_items or not np.array_equal(dims, np.arange(num_items + 1)):
        raise FormatError(f"{idx_path} holds arrays of several dimensions, not token sequences")
    if not np.array_equal(np.diff(offsets), sizes) or (sizes < 0).any():
        raise FormatError(f"{idx_path}: offsets do not follow from the sizes")
    dtype, text = meaning_of(code, width, bin_path)
    if dtype is None:
        raise FormatError(f"{idx_path}: dtype code {code} means {text}; these are no token ids")
    return Foreign(
        tokens_path=bin_path,
        dtype=dtype,
        layout=ArrayLayout(
            as_lengths(sizes, "a sequence"), indices[1:] if indices.size > 1 else None
        ),
        allow_negative=dtype.kind == "i",
    )


def _datatrove(path: Path) -> Foreign:
    index_path = path_of(path, ".index")
    with open_regular(index_path) as index, open_regular(path) as tokens:
        ends = np.fromfile(index, np.uint64).astype(np.int64)
        num_tokens, num_bytes = int(ends[-1]) if ends.size else 0, identity_of(tokens).num_bytes
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
        layout=ArrayLayout(as_lengths(lengths, "a document")),
    )


_INDEXED: dict[str, Callable[[Path], Foreign]] = {
    "mmididx": _mmididx,
    "tntidx": _tntidx,
    "datatrove": _datatrove,
}
KINDS = (*_INDEXED, *PLAIN_KINDS)


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
