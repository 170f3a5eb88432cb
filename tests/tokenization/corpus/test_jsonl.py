"""The C++ reader of JSON Lines takes what Python's own parser takes, and gives the same text."""

from __future__ import annotations

import json

import pytest
from fuzz.fuzz_jsonl import MISSING, OK, SEEDS, WRONG_TYPE, extract, python_says
from hypothesis import given
from hypothesis import strategies as st

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class Members(list[tuple[str, object]]):
    """An object as it is written: names may come twice."""


def spelled(value: object) -> str:
    if not isinstance(value, Members):
        return json.dumps(value)
    return "{" + ", ".join(f"{json.dumps(k)}: {spelled(v)}" for k, v in value) + "}"


@given(
    records=st.lists(
        st.dictionaries(
            st.sampled_from(["text", "te\nxt", "\u00e9", "url"]) | st.text(), json_values
        )
        | json_values,
        max_size=6,
    ),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, " ", "\t"]),
)
def test_json_values_are_pythons(
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


names = st.sampled_from(["a", "b", "c", "a.b", "b.c", "a.b.c", ""])


@given(
    records=st.lists(
        st.recursive(
            st.text(max_size=3) | st.integers(0, 9),
            lambda inner: st.lists(st.tuples(names, inner), max_size=4).map(Members),
            max_leaves=20,
        ),
        max_size=5,
    ),
    key=st.sampled_from(["a.b.c", "a.b", "a", ".a", "a.", "a..b", "."]),
)
def test_dotted_key_is_found_whole_or_nested(records: list[object], key: str) -> None:
    """Members of one name are written as often as they come; Python keeps the last."""
    lines = [spelled(record).encode("utf-8") for record in records]
    found = extract(b"".join(line + b"\n" for line in lines), key)
    assert found == [python_says(line, key) for line in lines]


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_a_line_may_end_anywhere_without_its_neighbour_being_read(seed: int) -> None:
    whole = SEEDS[seed].replace(b"\n", b" ")
    for cut in range(len(whole)):
        data = whole[:cut] + b"\n" + whole
        assert extract(data) == [python_says(whole[:cut]), python_says(whole)], cut


def test_every_byte_of_a_line_may_be_any_byte() -> None:
    for seed in SEEDS:
        line = bytearray(seed.replace(b"\n", b" "))
        for at, kept in enumerate(line):
            for byte in (0, 0x1F, 0x22, 0x2C, 0x5C, 0x7B, 0x7D, 0x80, 0xC3, 0xED, 0xF4, 0xFF):
                line[at] = byte
                assert extract(bytes(line)) == [python_says(bytes(line))], bytes(line)
            line[at] = kept


def test_scalars_stand_for_their_spelling_and_lists_for_their_json() -> None:
    data = b'{"k": 17}\n{"k": "x"}\n{"k": [1, {"a": "\\n"}]}\n{"k": null}\n{}'
    assert [status for status, _ in extract(data, "k", "scalars")] == [0, 0, WRONG_TYPE, 0, MISSING]
    assert [text for _, text in extract(data, "k", "scalars")] == [b"17", b"x", b"", b"null", b""]
    assert extract(data, "k", "lists")[2] == (OK, b'[1, {"a": "\\n"}]')
    with pytest.raises(ValueError, match="one of strings, scalars, lists"):
        extract(data, "k", "everything")
