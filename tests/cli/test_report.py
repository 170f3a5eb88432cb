"""How numbers look in what the commands print."""

from __future__ import annotations

import pytest

from megapack.words import counted, short, size


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 shards"), (1, "1 shard"), (106055, "106,055 shards")]
)
def test_a_count_agrees_with_its_noun(number: int, text: str) -> None:
    assert counted(number, "shard") == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1_000, "1 kB"), (41_234, "41.2 kB"), (1_234_567, "1.23 MB")],
)
def test_a_small_size_is_not_zero_megabytes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_large_numbers_are_shortened() -> None:
    assert short(1_234_567) == "1.23 M"
    assert short(999) == "999"
