"""Random bytes as JSON Lines: the C++ reader and Python's json agree on every line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megapack import _core

OK, BLANK, MALFORMED, NOT_OBJECT, MISSING, WRONG_TYPE, INVALID_UTF8 = range(7)
NOTHING = object()

SEEDS = [
    rb'{"text": "plain text, long enough for the wide path", "id": 7}',
    rb'{"a": {"b": [1, -2.5e-3, null, true, "x"]}, "text": "t\u00e9\ud83d\ude00\n\"q\""}',
    '{"url": "\u00e9", "text": "\u65e5\u672c\u8a9e \U0001f600 \u00fc"}\n{"text": ""}\n\n'.encode(),
    rb' [ {"text": "in a list"} ] ',
    rb'{"\u0074ext": "escaped key", "text2": [NaN, -Infinity, 1E+9], "text": "\ud800"}',
    b'{"text": {"a": {"b": "deep"}, "a.b": "rest"}, "text.a.b": "whole", "text": {}}',
    rb'{"text": "first", "text": "\"\\\/\b\f\n\r\t\u20AC"}',
    b'{"text": "half \\ud800"}\n{"text": "\xc3"}\n{"text": "\xed\xa0\x80"}\n{"text": "a\tb"}',
    b' \t\r\n{"text": "\\x"}\n{"text": "x",}\n{"text": "x"} x\n{text: 1}\n{"text": 01}',
    b'{"text": 1.}\n{"text": -}\n[1,]\n[1 2]\n[}\n{"a" 1}\n{"a": [}',
    b'{"text": {"a": {"b": "x"} "d": 1}}',
    b'{"text": 12}\r\n{"text": [1, {"text": "\\/"}]}\n{"other": "key"}\n17\n"text"',
]


def extract(data: bytes, key: str = "text", values: str = "strings") -> list[tuple[int, bytes]]:
    """Return (status, text) of every line."""
    given = np.frombuffer(data, np.uint8)
    text, offsets, status, line_begin = _core.extract_jsonl(given, key, values)
    assert len(status) == len(line_begin) == len(offsets) - 1
    flat = text.tobytes()
    return [(int(s), flat[a:b]) for s, a, b in zip(status, offsets[:-1], offsets[1:], strict=True)]


def value_at(record: object, key: str) -> object:
    """Return the value of the key, or of its parts between dots in nested objects; or NOTHING."""
    if not isinstance(record, dict):
        return NOTHING
    first, dot, tail = key.partition(".")
    if key in record or not dot:
        return record.get(key, NOTHING)
    return value_at(record.get(first), tail)


def python_says(line: bytes, key: str = "text") -> tuple[int, bytes]:
    """Return (status, text) of a line by Python's json, which accepts NaN and duplicate keys."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return INVALID_UTF8, b""
    if not text.strip(" \t\n\r"):
        return BLANK, b""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return MALFORMED, b""
    if not isinstance(record, dict):
        return NOT_OBJECT, b""
    value = value_at(record, key)
    if value is NOTHING:
        return MISSING, b""
    if not isinstance(value, str):
        return WRONG_TYPE, b""
    try:
        return OK, value.encode("utf-8")
    except UnicodeEncodeError:
        return INVALID_UTF8, b""


def run(data: bytes, directory: Path) -> None:
    lines = data.split(b"\n")
    if not lines[-1]:
        del lines[-1]
    for key in ("text", "text.a.b"):
        for line, extracted in zip(lines, extract(data, key), strict=True):
            assert extracted == python_says(line, key), (key, line)
