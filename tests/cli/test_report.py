"""How numbers look in what the commands print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.cli.main import main
from megapack.errors import ConfigError
from megapack.units import counted, parse_size, percent, short, size


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 shards"), (1, "1 shard"), (106055, "106,055 shards")]
)
def test_a_count_agrees_with_its_noun(number: int, text: str) -> None:
    assert counted(number, "shard") == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (41_234, "40.3 KiB"), (1_234_567, "1.18 MiB")],
)
def test_a_small_size_is_not_zero_megabytes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_large_numbers_are_shortened() -> None:
    numbers = (7, 999, 1500, 1_234_567, 2.5e6, 1e9, 3.14159e12)
    texts = ["7", "999", "1.5 k", "1.23 M", "2.5 M", "1 G", "3.14 T"]
    assert [short(number) for number in numbers] == texts
    assert [percent(0.00123), percent(0.00123, None), percent(0.99999, None)] == [
        "0.12 %",
        "0.123 %",
        "100 %",
    ]


@given(st.integers(0, 1 << 50))
def test_sizes_are_read_as_they_are_printed(num_bytes: int) -> None:
    assert parse_size(str(num_bytes)) == parse_size(num_bytes) == num_bytes
    assert abs(parse_size(size(num_bytes)) - num_bytes) <= 0.005 * num_bytes


@given(st.integers(0, 1023), st.sampled_from("KMGT"))
def test_sizes_of_one_unit_are_read_and_printed_exactly(number: int, unit: str) -> None:
    num_bytes = number << (10 * ("KMGT".index(unit) + 1))
    for text in (
        f"{number}{unit}",
        f"{number}{unit.lower()}",
        f"{number} {unit}iB",
        f"{number}{unit}B",
    ):
        assert parse_size(text) == num_bytes
    assert size(num_bytes) == (f"{number} {unit}iB" if number else "0 B")


def test_sizes_are_exact_where_a_float_is_not() -> None:
    assert parse_size("9007199254740993") == 9007199254740993
    assert parse_size("0.3K") == 307 and parse_size("1.5G") == 3 << 29


@pytest.mark.parametrize(
    "text", ["", "M", "1.5.5M", "-1", "1e9", "64X", "0x10", "nan", "1,000", True]
)
def test_wrong_size_is_refused_with_a_right_one(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"is not a size; write 4096, 64M or 1\.5G"):
        parse_size(text)
    with pytest.raises(SystemExit, match="2"):
        main(["tokenize", "--input", "x", "--output-prefix", "y", f"--block-bytes={text}"])
    assert f"{str(text)!r} is not a size" in capsys.readouterr().err
