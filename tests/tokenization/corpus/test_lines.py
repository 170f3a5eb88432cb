"""Files are entered anywhere, and every line is read exactly once."""

from __future__ import annotations

import io
import itertools

from hypothesis import given
from hypothesis import strategies as st

from megapack.tokenization.corpus.readers import line_blocks


def lines_of(
    data: bytes, begin: int = 0, end: int | None = None, *, block: int = 16, longest: int = 1 << 20
) -> tuple[list[tuple[int, bytes]], list[int]]:
    """(position, line) of every line given, and the positions of lines that were too long."""
    long_lines: list[int] = []
    result = []
    for position, chunk in line_blocks(
        io.BytesIO(data),
        begin=begin,
        end=end,
        block_bytes=block,
        max_line_bytes=longest,
        on_long_line=long_lines.append,
    ):
        at = position
        for line in chunk.splitlines(keepends=True):
            result.append((at, line))
            at += len(line)
    return result, long_lines


@given(
    lines=st.lists(st.binary(max_size=40).map(lambda b: b.replace(b"\n", b".").replace(b"\r", b".")
                                              .replace(b"\x0b", b".").replace(b"\x0c", b".")
                                              .replace(b"\xef", b"."))),
    last_ends=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=4),
    block=st.integers(1, 50),
)  # fmt: skip
def test_ranges_share_out_a_file_wherever_they_are_cut(
    lines: list[bytes], last_ends: bool, cuts: list[int], block: int
) -> None:
    data = b"\n".join(lines) + (b"\n" if last_ends else b"")
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    found = []
    for begin, end in itertools.pairwise(bounds):
        found += lines_of(data, begin, end, block=block)[0]
    starts = [0, *itertools.accumulate(len(line) for line in data.splitlines(keepends=True))]
    assert found == list(zip(starts, data.splitlines(keepends=True), strict=False))


def test_a_line_longer_than_allowed_is_left_out_and_told_by_its_position() -> None:
    data = b"one\n" + b"x" * 100 + b"\ntwo\n" + b"y" * 100
    found, long_lines = lines_of(data, block=8, longest=50)
    assert found == [(0, b"one\n"), (105, b"two\n")]
    assert long_lines == [4, 109]


def test_a_long_line_is_kept_whole_however_small_the_blocks_are() -> None:
    data = b"a\n" + b"x" * 1000 + b"\nb"
    assert lines_of(data, block=3)[0] == [(0, b"a\n"), (2, b"x" * 1000 + b"\n"), (1003, b"b")]


def test_a_byte_order_mark_is_dropped_at_the_start_of_the_file_alone() -> None:
    bom = b"\xef\xbb\xbf"
    data = bom + b"a\n" + bom + b"b\n"
    for cut in range(len(data) + 1):
        parts = lines_of(data, 0, cut)[0] + lines_of(data, cut, len(data))[0]
        assert [line for _, line in parts] == [b"a\n", bom + b"b\n"], cut
