"""The C++ reader of JSON Lines takes what Python's own parser takes, and gives the same text."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack import _core

OK, BLANK, MALFORMED, NOT_OBJECT, MISSING, WRONG_TYPE, INVALID_UTF8 = range(7)


def extract(data: bytes, key: str = "text", values: str = "strings") -> list[tuple[int, bytes]]:
    text, offsets, status, line_begin = _core.extract_jsonl(
        np.frombuffer(data, np.uint8), key, values
    )
    assert len(status) == len(line_begin) == len(offsets) - 1
    flat = text.tobytes()
    return [(int(s), flat[a:b]) for s, a, b in zip(status, offsets[:-1], offsets[1:], strict=True)]


def python_says(line: bytes, key: str = "text") -> tuple[int, bytes]:
    """The same by Python's json; NaN and the last of duplicate keys are its habits, too."""
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
    if key not in record:
        return MISSING, b""
    if not isinstance(record[key], str):
        return WRONG_TYPE, b""
    try:
        return OK, record[key].encode("utf-8")
    except UnicodeEncodeError:
        return INVALID_UTF8, b""


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(
    records=st.lists(
        st.dictionaries(st.sampled_from(["text", "te\nxt", "é", "url"]) | st.text(), json_values)
        | json_values,
        max_size=6,
    ),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, " ", "\t"]),
)
def test_every_json_value_is_read_as_python_reads_it(
    records: list[object], ascii_only: bool, indent: str | None
) -> None:
    separators = None if indent is None else (f"{indent},{indent}", f"{indent}:{indent}")
    lines = [
        json.dumps(record, ensure_ascii=ascii_only, separators=separators).encode(
            "utf-8", "surrogatepass"
        )
        for record in records
    ]
    assert extract(b"".join(line + b"\n" for line in lines)) == [python_says(ln) for ln in lines]


SEEDS = [
    rb'{"text": "plain text, long enough for the wide path", "id": 7}',
    rb'{"a": {"b": [1, -2.5e-3, null, true, "x"]}, "text": "t\u00e9\ud83d\ude00\n\"q\""}',
    '{"url": "é", "text": "日本語 \U0001f600 ü"}'.encode(),
    rb' [ {"text": "in a list"} ] ',
    rb'{"\u0074ext": "escaped key", "text2": NaN}',
]
ALPHABET = [
    *(bytes([c]) for c in b'"\\/{}[]:,0123456789-+.eEntrfalsuNI \t\r\x00\x1f\x7f'),
    *(b"\\u", b"\\ud800", b"\\udc00", b"text", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90"),
    "é".encode(),
    "\U0001f600".encode(),
]


def mutated(rng: random.Random) -> bytes:
    line = bytearray(rng.choice(SEEDS))
    for _ in range(rng.choice([1, 1, 2, 3, 6])):
        at = rng.randrange(len(line) + 1)
        action = rng.randrange(4)
        if action == 0:
            line[at:at] = rng.choice(ALPHABET)
        elif action == 1:
            del line[at : at + rng.choice([1, 1, 2, 5, 20])]
        elif action == 2:
            line[at : at + 1] = rng.choice(ALPHABET)
        else:
            other = rng.choice(SEEDS)
            begin = rng.randrange(len(other))
            line[at:at] = other[begin : begin + rng.randrange(12)]
    return bytes(line).replace(b"\n", b" ")


def test_mutated_lines_are_judged_as_python_judges_them() -> None:
    rng = random.Random(20261120)
    lines = [mutated(rng) for _ in range(30_000)]
    found = extract(b"".join(line + b"\n" for line in lines))
    kinds = set()
    for line, result in zip(lines, found, strict=True):
        assert result == python_says(line), line
        kinds.add(result[0])
    assert kinds >= {OK, MALFORMED, MISSING, WRONG_TYPE, INVALID_UTF8}, "the fuzz became tame"


def test_a_line_may_end_anywhere_without_its_neighbour_being_read() -> None:
    whole = SEEDS[1]
    for cut in range(len(whole)):
        data = whole[:cut] + b"\n" + whole
        assert extract(data) == [python_says(whole[:cut]), python_says(whole)], cut


def test_scalars_stand_for_their_spelling_and_lists_for_their_json() -> None:
    data = b'{"k": 17}\n{"k": "x"}\n{"k": [1, {"a": "\\n"}]}\n{"k": null}\n{}'
    assert [status for status, _ in extract(data, "k", "scalars")] == [0, 0, WRONG_TYPE, 0, MISSING]
    assert [text for _, text in extract(data, "k", "scalars")] == [b"17", b"x", b"", b"null", b""]
    assert extract(data, "k", "lists")[2] == (OK, b'[1, {"a": "\\n"}]')
    with pytest.raises(ValueError, match="strings, scalars or lists"):
        extract(data, "k", "everything")
