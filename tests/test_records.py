"""Records on disk and untrusted YAML: errors name path, key, value and remedy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from megapack.config import read_yaml
from megapack.errors import FormatError, ResumeError
from megapack.records import check_inside, parse_json, read_record


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    sizes: list[int]


@dataclass(frozen=True, kw_only=True)
class Record:
    step: int
    parts: tuple[Part, ...] = ()
    note: str | None = None
    version: Literal[1] = 1


GOOD: dict[str, Any] = {"step": 3, "parts": [{"name": "a", "sizes": [1]}], "version": 1}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 99}, "version is 99; it must be one of 1"),
        ({"version": "1"}, "version is '1'"),
        ({"version": True}, "version is True"),
        ({"step": "seven"}, "step is 'seven'; it must be of type int"),
        ({"step": None}, "step is None"),
        ({"parts": [1]}, r"parts\[0\] is 1; it must be a mapping"),
        ({"parts": [{"name": "a"}]}, r"parts\[0\]: missing key 'sizes'"),
        ({"parts": [{"name": "a", "sizes": ["b"]}]}, r"sizes\[0\] is 'b'"),
        ({"stepp": 3}, "unknown key 'stepp'; did you mean 'step'"),
        ({"note": 3}, "note is 3"),
    ],
)
def test_a_damaged_record_is_named_by_key_and_value(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ResumeError, match=rf"record.json.*{named}.*; copy it again"):
        read_record(Record, path, remedy="copy it again", error=ResumeError)
    path.write_text(json.dumps(GOOD))
    assert read_record(Record, path, remedy="").parts == (Part(name="a", sizes=[1]),)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000])
def test_text_that_is_no_json_is_one_line(text: bytes) -> None:
    with pytest.raises(FormatError, match=r"^here is not valid JSON .*; copy it again$") as error:
        parse_json(text, "here", remedy="copy it again")
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "..", "", "a\\..\\x", "a\0b"])
def test_names_that_leave_their_folder_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be a relative path inside its folder"):
        check_inside("a name", name)
    check_inside("a name", "folder/file..pt")


LETTERS = "abcdefghijklmnopqrst"
BOMB = "a: &a [x]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 10)}]\n" for old, new in pairwise(LETTERS)
)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {b: *a}",
        "&a [*a]",
        "a: " + "[" * 5000 + "]" * 5000,
        "a: " + "{b: " * 5000,
        "- " * 5000,
        "".join(" " * i + "a:\n" for i in range(2000)),
        BOMB,
        BOMB.replace("[", "{<<: [").replace("]", "]}").replace("{<<: [x]}", "{x: 1}"),
        "a: 2001-99-99",
        "a: " + "1" * 5000,
        "a: 0x" + "f" * 5000,
        "a: " + ":".join(["59"] * 2000),
    ],
    ids=lambda text: text[:12],
)
def test_hostile_yaml_is_refused_before_it_costs_time_or_memory(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)


def test_only_keys_that_are_written_twice_are_refused() -> None:
    text = "a: &a {x: 1}\nb: {c: &c {<<: *a, x: 2}}\nd: {<<: *c, x: 3}"
    assert read_yaml(text)["d"] == {"x": 3} and read_yaml(text)["b"]["c"] == {"x": 2}
    with pytest.raises(yaml.YAMLError, match="key 'x' occurs twice"):
        read_yaml("a: {b: [{x: 1, x: 1}]}")


def test_aliases_of_ordinary_size_are_expanded() -> None:
    assert read_yaml("a: &a {x: 1}\nb: {<<: *a, y: [*a]}")["b"] == {"x": 1, "y": [{"x": 1}]}
