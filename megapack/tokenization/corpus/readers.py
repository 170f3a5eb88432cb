"""Pieces of input files -> blocks of documents."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from megapack.tokenization.corpus.blocks import TextBlock
from megapack.tokenization.corpus.faults import Faults, Place
from megapack.tokenization.corpus.jsonl import read_jsonl
from megapack.tokenization.corpus.pieces import TABLES, InputFile, Piece, ReadOptions
from megapack.tokenization.corpus.streams import open_stream
from megapack.tokenization.corpus.tables import read_table

__all__ = ["read_blocks"]


def read_blocks(
    pieces: Iterable[Piece], options: ReadOptions, faults: Faults
) -> Iterator[TextBlock]:
    """The documents of ``pieces``, in order, as blocks without empty or invalid documents.

    Raises:
        DataError: a fault, where ``faults`` does not skip; a damaged file.
        OSError: a file cannot be read.
    """
    for is_text, group in itertools.groupby(pieces, lambda piece: piece.file.format == "text"):
        if is_text:
            yield from _read_texts([piece.file for piece in group], options, faults)
            continue
        for piece in group:
            read = read_table if piece.file.format in TABLES else read_jsonl
            yield from read(piece, options, faults)


def _read_texts(
    files: Iterable[InputFile], options: ReadOptions, faults: Faults
) -> Iterator[TextBlock]:
    names: list[str] = []
    texts: list[bytes] = []
    size = 0
    for file in files:
        text = _read_text(file, options, faults)
        if text is None:
            continue
        names.append(file.path)
        texts.append(text)
        size += len(text)
        if size >= options.block_bytes:
            yield _text_block(names, texts).checked(faults, known_utf8=False)
            names, texts, size = [], [], 0
    if names:
        yield _text_block(names, texts).checked(faults, known_utf8=False)


def _read_text(file: InputFile, options: ReadOptions, faults: Faults) -> bytes | None:
    parts: list[bytes] = []
    size = 0
    with open_stream(file) as stream:
        while size <= options.max_document_bytes and (part := stream.read(options.block_bytes)):
            parts.append(part)
            size += len(part)
    place = Place(file.path, "file")
    if size > options.max_document_bytes:
        limit = f"a file of more than {options.max_document_bytes:,} bytes"
        faults.record("too long", place, f"{limit}; see --max-document-bytes")
        return None
    text = b"".join(parts)
    if b"\0" in text:
        faults.record("NUL bytes", place, "it is binary, or UTF-16 and wants iconv -t UTF-8")
        return None
    return text.removeprefix(b"\xef\xbb\xbf")


def _text_block(names: list[str], texts: list[bytes]) -> TextBlock:
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    flat = np.frombuffer(b"".join(texts), np.uint8)
    return TextBlock(flat, offsets, np.arange(len(texts)), lambda i: Place(names[i], "file"))
