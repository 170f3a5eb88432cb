"""Import token files of other tools as datasets, without copying tokens if the layout allows.

``foreign.py`` reads the files; ``LINKS`` and ``SEPARATED`` are the values of the arguments ``link``
and ``eod_at`` of ``import_dataset``.
A file of the five uint16 tokens 7 8 0 9 0, in which 0 ends a document::

    import_dataset("train.bin", "train", dtype="uint16", eod_token=0)
    # -> "train: 2 documents, 5 uint16 tokens (flat, .bin unchanged)": [7, 8, 0] and [9, 0]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megapack.errors import ConfigError, DataError, FormatError
from megapack.storage.column_edits import write_rows
from megapack.storage.columns import INTERPRETED, LABELS, ColumnSpec, ColumnWriter, column_path
from megapack.storage.files import (
    AtomicFile,
    Publishable,
    create_temporary,
    open_regular,
    read_array_blocks,
    remove_leftovers,
)
from megapack.storage.foreign import KINDS, Foreign, detect, open_foreign
from megapack.storage.index_file import COMPANIONS, path_of, prefix_of
from megapack.storage.index_writer import (
    ArrayLayout,
    DatasetContent,
    check_prefix,
    check_prefix_names,
    publish_dataset,
)
from megapack.storage.locks import WriterLock
from megapack.storage.metadata import COLUMNS, TokenFacts, check_metadata, file_checksum, read_meta
from megapack.storage.remote.copies import local_output
from megapack.storage.token_scan import (
    Scan,
    check_width,
    count_separators_only,
    edge_tokens,
    likely_dtype,
    mapped_tokens,
    split_documents,
)
from megapack.storage.tokens import TokenLimits, TokenWriter, as_tokens

LINKS = ("auto", "hard", "symbolic", "copy")
SEPARATED = ("end", "start", "both")


@dataclass(frozen=True)
class _Source:
    """File with known documents and checked tokens."""

    foreign: Foreign
    layout: ArrayLayout
    facts: TokenFacts
    metadata: dict[str, Any]
    notes: list[str]


def _read(
    path: str | os.PathLike[str],
    kind: str,
    *,
    dtype: DTypeLike | None,
    eod_token: int | None,
    eod_at: str | None,
    vocab_size: int | None,
) -> _Source:
    """Find the documents of a file and check its tokens."""
    foreign = open_foreign(path, kind, dtype=dtype)
    name = foreign.tokens_path
    if foreign.vocab_size is not None and vocab_size not in (None, foreign.vocab_size):
        raise ConfigError(
            f"--vocab-size is {vocab_size}; {name} has {foreign.vocab_size}: leave out --vocab-size"
        )
    vocab_size = foreign.vocab_size if vocab_size is None else vocab_size
    foreign = replace(foreign, vocab_size=vocab_size)
    if foreign.layout is None and eod_token is None:
        raise ConfigError(f"{name} has no index: give the separator of documents (--eod-token)")
    if foreign.layout is not None and (eod_token is not None or eod_at is not None):
        raise ConfigError(
            f"{path} is of kind {kind}, whose files record where documents end: leave out "
            "--eod-token and --eod-at, or give --kind flat to read it without its index"
        )
    scan = Scan(foreign, eod_token)
    if foreign.recorded is None:
        check_width(foreign, scan, vocab_size)
    _check_ids(foreign, scan.facts)
    promises: dict[str, int] = {}
    if foreign.layout is None:
        assert eod_token is not None
        usual = "start" if kind == "llm.c" else "end"
        layout, promises = split_documents(foreign, scan, eod_token, eod_at, usual)
        if eod_at != "both":
            promises = {**edge_tokens(foreign, layout, scan), **promises}
    else:
        layout = foreign.layout
        if foreign.pointers is None:
            promises = edge_tokens(foreign, layout, scan)
    notes = []
    separators = [*promises.values()] or ([] if eod_token is None else [eod_token])
    if foreign.pointers is None:
        num_empty = count_separators_only(foreign, layout, separators)
        notes += [f"{num_empty} of the documents contain only a separator"] * (num_empty > 0)
    metadata: dict[str, Any] = {**promises, **foreign.metadata}
    if tokenizer := metadata.get("tokenizer", {}).get("name"):
        notes.append(f"tokenizer {tokenizer}")
    notes += [f"{key} {promises[key]}" for key in sorted(promises)]
    return _Source(foreign, layout, scan.facts, metadata, notes)


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
    columns: Mapping[str, tuple[NDArray[Any], ColumnSpec]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> str:
    """Make a dataset from another tool's tokens; return a summary as text.

    The .bin is a link to the file if that contains only tokens; otherwise tokens are copied.
    Documents keep their order and sequences. All tokens are read once, for their checksum and
    range. A loss mask becomes the column ``labels``. An equal dataset is not written again.

    Args:
        path: file or prefix. If it is ``<output>.bin`` itself, that file stays unchanged.
        output: prefix of the dataset; a remote one is uploaded when it is complete.
        kind: the file's format, one of ``KINDS``; detected by default.
        dtype: type of the tokens, if the file does not record it.
        eod_token: id that separates documents, if the file does not record where they end.
        eod_at: position of ``eod_token`` in a document: ``"end"``, ``"start"`` (default for
            llm.c), or ``"both"``.
        link: ``"hard"``, ``"symbolic"``, ``"copy"``, or ``"auto"``: the first of these that works.
        vocab_size: number of token ids; ids must be smaller. Recorded in the meta file.
        columns: name -> (rows, type) of columns, one row per token in the order of the file, as in
            a teacher's dump; rows (num_tokens, *shape) may be a memory map.
        metadata: facts for the meta file, which JSON can represent.
        overwrite: replace a different dataset at ``output``.

    Raises ConfigError if ``output`` is a different dataset or not writable, or an argument is
    missing or contradicts the file; LockedError if another process writes ``output``; FormatError
    if the file is damaged, of another format, or does not fit the files next to it; DataError if
    the separator never occurs, the ids contradict the dtype or the vocabulary, or a column does not
    have one row of its type per token; and OSError if a file cannot be read, linked or written.
    """
    if link not in LINKS:
        raise ConfigError(f"link is {link!r}; choose from {', '.join(LINKS)}")
    if eod_at is not None and eod_at not in SEPARATED:
        raise ConfigError(f"eod_at is {eod_at!r}; choose from {', '.join(SEPARATED)}")
    output = prefix_of(output)
    if kind == "auto":
        kind = detect(path)
        if prefix_of(path) == output:  # in place: an earlier import may have written an .idx
            earlier_kind = (read_meta(output) or {}).get("imported_from")
            kind = earlier_kind if earlier_kind in KINDS else kind
    if kind == "mmididx" and prefix_of(path) != output:
        _refuse_companions(prefix_of(path))
    with local_output(output, overwrite=overwrite) as target, WriterLock(target, what="import"):
        bin_path = path_of(target, ".bin")
        source_path = path_of(prefix_of(path), ".bin") if kind == "mmididx" else Path(path)
        keeps_bin = bin_path.exists() and bin_path.samefile(source_path)
        check_prefix_names(target, keeps_bin=keeps_bin)
        source = _read(
            path, kind, dtype=dtype, eod_token=eod_token, eod_at=eod_at, vocab_size=vocab_size
        )
        source.metadata.update({"imported_from": kind, **(metadata or {})})
        check_metadata(source.metadata)
        if keeps_bin and source.foreign.begin_byte:
            raise ConfigError(f"{bin_path} is the input and has a header; choose another output")
        with ExitStack() as unpublished:
            writers = _column_writers(target, columns or {}, source, unpublished)
            if source.foreign.mask_path is not None:
                writers.append(_labels_of_mask(target, source, unpublished))
            keeps_bin = keeps_bin and source.foreign.pointers is None
            how = _write(
                source, target, link, keeps_bin=keeps_bin, overwrite=overwrite, columns=writers
            )
    if how is None:
        return f"nothing to do: {output} exists already"
    tokens = f"{source.foreign.num_tokens} {source.foreign.dtype.name} tokens ({kind}, .bin {how})"
    summary = [f"{output}: {source.layout.num_documents} documents, {tokens}", *source.notes]
    return "; ".join(summary)


def _refuse_companions(prefix: str) -> None:
    """Raise ConfigError if the dataset has labels, weights, groups or columns."""
    companions = [f"{prefix}{end}" for end in COMPANIONS if path_of(prefix + end, ".idx").exists()]
    columns = (read_meta(prefix) or {}).get(COLUMNS, {})
    for companion in (*companions, *(column_path(prefix, name) for name in columns)):
        raise ConfigError(
            f"{companion} belongs to {prefix}, and import would not copy it: copy the files "
            "of both; datasets of megapack need no import"
        )


def _column_writers(
    target: str,
    columns: Mapping[str, tuple[NDArray[Any], ColumnSpec]],
    source: _Source,
    unpublished: ExitStack,
) -> list[ColumnWriter]:
    """Write the columns under temporary names, which ``unpublished`` removes."""
    foreign, writers = source.foreign, []
    if LABELS in columns and foreign.mask_path is not None:
        raise ConfigError(
            f"{foreign.mask_path} gives labels already: remove it, or leave out --column {LABELS}"
        )
    for name, (values, spec) in columns.items():
        writers.append(ColumnWriter(target, name, spec))
        unpublished.callback(writers[-1].target.discard)
        if foreign.pointers is None:
            write_rows(writers[-1], values, foreign.num_tokens)
            continue
        begins = foreign.pointers // foreign.dtype.itemsize
        extents = zip(begins.tolist(), source.layout.lengths.tolist(), strict=True)
        in_order = (values[begin : begin + length] for begin, length in extents)
        write_rows(writers[-1], in_order, source.layout.lengths.tolist())
    return writers


def _write(
    source: _Source,
    target: str,
    link: str,
    *,
    keeps_bin: bool,
    overwrite: bool,
    columns: list[ColumnWriter],
) -> str | None:
    """Publish the dataset. Return how .bin was made, or None if all files existed."""
    foreign, layout, how = source.foreign, source.layout, "unchanged"
    bin_path, tokens = path_of(target, ".bin"), source.facts
    bin_file: Publishable | None = None
    try:
        if foreign.pointers is not None:
            tokens, bin_file = _in_order(foreign, foreign.pointers, layout, bin_path)
            how = "copied in order"
        content = DatasetContent(
            dtype=foreign.dtype,
            layouts=[layout],
            tokens=tokens,
            vocab_size=foreign.vocab_size,
            metadata=source.metadata,
            multimodal=layout.modes is not None,
            columns={writer.name: writer.finish() for writer in columns},
        )
        is_new = check_prefix(
            target,
            overwrite=overwrite,
            difference=partial(content.difference_from, target),
            keeps_bin=keeps_bin,
            columns=content.columns,
        )
        if not is_new:
            return None
        if bin_file is None and not keeps_bin:
            bin_file, how = _link_or_copy(foreign, bin_path, link)
        publish_dataset(target, content, bin_file, columns=[writer.target for writer in columns])
    finally:
        if bin_file is not None:
            bin_file.discard()
    return how


def _labels_of_mask(target: str, source: _Source, unpublished: ExitStack) -> ColumnWriter:
    """Write labels, -100 where the loss mask is 0, as ``_column_writers`` writes columns."""
    foreign, mask_path = source.foreign, source.foreign.mask_path
    assert mask_path is not None
    dtype = "int64" if foreign.dtype.itemsize == 8 else "int32"
    writer = ColumnWriter(target, LABELS, replace(INTERPRETED[LABELS], dtype=dtype))
    unpublished.callback(writer.target.discard)
    tokens, num_masked = mapped_tokens(foreign), 0
    with open_regular(mask_path) as file:
        for mask in read_array_blocks(file, np.uint8, foreign.num_tokens):
            if mask.max() > 1:
                raise FormatError(
                    f"{mask_path} has the byte {int(mask.max())}; a loss mask has only 0 and 1: "
                    "restore it, or remove it to give every token loss"
                )
            num_masked += mask.size - int(np.count_nonzero(mask))
            labels = tokens[writer.num_rows : writer.num_rows + mask.size].astype(dtype)
            writer.append(np.where(mask, labels, writer.spec.numpy_dtype.type(writer.spec.fill)))
    digest = file_checksum(mask_path)
    source.metadata["loss_mask"] = {"masked_tokens": num_masked, "xxh3_128": digest}
    source.notes.append(f"{num_masked} tokens without loss according to {mask_path.name}")
    return writer


def _check_ids(foreign: Foreign, tokens: TokenFacts) -> None:
    """Raise if ids are outside the limits, or tokens do not match their meta file."""
    limits = TokenLimits(foreign.dtype, foreign.vocab_size, foreign.allow_negative)
    if tokens.token_range is not None and not limits.hold(*tokens.token_range):
        low, high = tokens.token_range
        bits = foreign.dtype.itemsize * 8
        also = f" ({low % 2**bits} as uint{bits})" if low < 0 else ""
        likely = likely_dtype(foreign, foreign.vocab_size)
        hint = f"; read as {likely}, they fit" if likely else ""
        raise DataError(
            f"{foreign.tokens_path} has ids from {low}{also} to {high}, outside "
            f"{limits.describe()}{hint}"
        )
    recorded = foreign.recorded
    if recorded is not None and (
        recorded.token_range != tokens.token_range
        or (len(recorded.checksums) == 1 and recorded.checksums != tokens.checksums)
    ):
        raise FormatError(
            f"{foreign.tokens_path} does not match its .meta.json: restore it or remove that file"
        )


def _in_order(
    foreign: Foreign, pointers: NDArray[np.int64], layout: ArrayLayout, bin_path: Path
) -> tuple[TokenFacts, AtomicFile]:
    """Copy the sequences in the order of the index; return facts and the unpublished file."""
    width = foreign.dtype.itemsize
    size = foreign.tokens_path.stat().st_size // width
    tokens = np.memmap(foreign.tokens_path, foreign.dtype, "r", shape=(size,))
    begins, remainders = np.divmod(pointers, width)
    if remainders.any() or (begins < 0).any() or (begins + layout.lengths > size).any():
        raise FormatError(f"{foreign.tokens_path}: sequences lie outside the file; restore it")
    limits = TokenLimits(foreign.dtype, foreign.vocab_size, foreign.allow_negative)
    writer = TokenWriter(bin_path, limits)
    extents = zip(begins.tolist(), layout.lengths.tolist(), strict=True)
    for sequence, (begin, length) in enumerate(extents):
        writer.append(as_tokens(tokens[begin : begin + length]), first_document=sequence)
    return writer.finish(), writer.target


def _link_or_copy(foreign: Foreign, bin_path: Path, link: str) -> tuple[Publishable, str]:
    """Return an unpublished link to the tokens, or a copy of them, and how it was made."""
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
    """Link under a temporary name."""

    def __init__(self, path: Path, make: Callable[[Path], None]) -> None:
        self.path = path
        remove_leftovers(path)
        self.temporary, _ = create_temporary(path, make)

    def sync(self) -> None:
        """Do nothing: a link contains no data."""

    def take_name(self) -> None:
        self.temporary.replace(self.path)

    def discard(self) -> None:
        self.temporary.unlink(missing_ok=True)
