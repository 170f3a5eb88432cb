"""Documents of JSON Lines, plain, .gz or .zst."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.tokenization.corpus.blocks import TextBlock
from megapack.tokenization.corpus.faults import Faults, Place, json_kind
from megapack.tokenization.corpus.lines import line_blocks
from megapack.tokenization.corpus.pieces import Piece, ReadOptions
from megapack.tokenization.corpus.streams import open_stream

__all__ = ["read_jsonl"]

# LineStatus of csrc/core/text/jsonl.hpp, from 1 on.
_LINE_FAULTS = (
    "blank line",
    "malformed JSON",
    "not a JSON object",
    "missing key",
    "wrong type",
    "invalid UTF-8",
    "no split key",
)

_NOTHING = object()
_WANTED = "one object per line is wanted, as jq -c '.[]' writes an array"
_SHOWN = 8  # keys, where the one that was asked for is not there


def read_jsonl(piece: Piece, options: ReadOptions, faults: Faults) -> Iterator[TextBlock]:
    # Inside a compressed file a byte position leads nowhere; count lines there instead.
    counts_lines = bool(piece.file.compression)
    locate = functools.partial(Place, piece.file.path, "line" if counts_lines else "byte")
    lines_before = 0

    def on_long_line(position: int) -> None:
        nonlocal lines_before
        lines_before += 1
        faults.record(
            "too long",
            locate(lines_before if counts_lines else position),
            f"a line of more than {options.max_document_bytes:,} bytes; see --max-document-bytes",
        )

    with open_stream(piece.file) as stream:
        for position, data in line_blocks(
            stream,
            begin=piece.begin,
            end=None if counts_lines else piece.end,
            block_bytes=options.block_bytes,
            max_line_bytes=options.max_document_bytes,
            on_long_line=on_long_line,
        ):
            lines = np.frombuffer(data, np.uint8)
            text, offsets, status, line_begin = _core.extract_jsonl(
                lines, options.json_key, options.values
            )
            positions = line_begin + position
            if counts_lines:
                positions = np.arange(1, len(status) + 1) + lines_before
                lines_before += len(status)
            block = TextBlock(text, offsets, positions, locate)
            if options.beside:
                block = _with_values_beside(block, lines, options.beside)
            if options.split_key is not None:
                block, no_key = _with_hashes(block, lines, options.split_key)
                status[(status == 0) & no_key] = len(_LINE_FAULTS)

            def detail(row: int) -> str:
                line = data[int(line_begin[row]) :].partition(b"\n")[0]  # noqa: B023 (called now)
                return _line_detail(line, options)

            rows_of = {
                fault: np.flatnonzero(status == i) for i, fault in enumerate(_LINE_FAULTS, 1)
            }
            found = [(int(rows[0]), fault) for fault, rows in rows_of.items() if len(rows)]
            for _, fault in sorted(found):  # the first line that stops the build comes first
                faults.record_rows(fault, rows_of[fault], block.place, detail)
            yield block.select(status == 0).checked(faults, known_utf8=True)


def _with_hashes(
    block: TextBlock, lines: NDArray[np.uint8], key: str
) -> tuple[TextBlock, NDArray[np.bool_]]:
    """The block with hashes of ``key``, and which documents do not have it."""
    text, offsets, status, _ = _core.extract_jsonl(lines, key, "scalars")
    keys = dataclasses.replace(block, text=text, offsets=offsets)
    return dataclasses.replace(block, hashes=keys.text_hashes()), status != 0


def _with_values_beside(
    block: TextBlock, lines: NDArray[np.uint8], beside: tuple[tuple[str, str], ...]
) -> TextBlock:
    """The block, conversations as objects where their lines have more to say; null says nothing."""
    values: list[list[str]] = [[] for _ in range(len(block))]
    for name, key in beside:
        text, offsets, _, _ = _core.extract_jsonl(lines, key, "any")
        found = dataclasses.replace(block, text=text, offsets=offsets).strings()
        for i, value in enumerate(found):
            if value not in ("", "null"):
                values[i].append(f"{json.dumps(name)}: {value}")
    if not any(values):
        return block
    pairs = zip(block.strings(), values, strict=True)
    texts = [
        f'{{"messages": {messages}, {", ".join(more)}}}' if messages and more else messages
        for messages, more in pairs
    ]
    composed = TextBlock.of_strings(texts)
    return dataclasses.replace(block, text=composed.text, offsets=composed.offsets)


def _line_detail(line: bytes, options: ReadOptions) -> str:
    """What Python's own parser says about a line that was refused."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"{error}; {_WANTED}" if line.strip() in (b"[", b"{") else str(error)
    if not isinstance(record, dict):
        return f"the line holds {json_kind(record)}; {_WANTED}"
    for key, option in options.keys().items():
        if _value_at(record, key) is _NOTHING:
            names = ", ".join(_names(record)[:_SHOWN]) or "none"
            return f"there is no key {key!r} among: {names}; see {option}"
    found, wanted = _value_at(record, options.json_key), list if options.values == "lists" else str
    if not isinstance(found, wanted):
        return f"{options.json_key!r} holds {json_kind(found)}, not {json_kind(wanted())}"
    return "a string holds half of a surrogate pair, or the split key is no string or number"


def _value_at(record: object, key: str) -> object:
    """As csrc/core/text/jsonl.cpp finds a key: all of it, else its first part and the rest."""
    first, dot, rest = key.partition(".")
    if not isinstance(record, dict):
        return _NOTHING
    return record.get(key, _value_at(record.get(first), rest) if dot else _NOTHING)


def _names(record: dict[str, object]) -> list[str]:
    """The keys of an object, those of objects in it behind a dot."""
    names = []
    for name, value in sorted(record.items()):
        inner = _names(value) if isinstance(value, dict) else []
        names += [f"{name}.{below}" for below in inner] or [name]
    return names
