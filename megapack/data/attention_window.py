"""Attention windows: segments cut at multiples of a window that may grow while a run goes on.

With a window of w tokens a segment is cut at its positions w, 2 w, ...; attention stays inside the
pieces, so a token sees at most w others and a step costs less. Labels and position ids stay, so the
same tokens are learned. SkyLadder (Zhu et al. 2025, arXiv 2503.15450) begins with short windows and
lets them grow to the whole context: faster, and better at the same number of tokens.

Only the boundaries differ, ``cu_seqlens`` and ``max_seqlen``. RoPE counts relative positions, so it
may start over at a boundary (as Megatron's does); layers that are no attention but read the same
boundaries (state space models) are cut, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack.errors import ConfigError

__all__ = ["Bounds", "Window", "check_windows", "cut_bounds", "cut_lengths"]


class Window(NamedTuple):
    """A window that goes from ``first`` tokens at step ``begin`` to ``last`` at ``begin + steps``.

    Between them it is the line between both, rounded down to a multiple of their greatest common
    divisor; ``steps`` 0: it is ``last``.
    """

    last: int
    first: int = 0
    begin: int = 0
    steps: int = 0

    def at(self, step: int) -> int:
        """Tokens, of a step of the run."""
        passed = step - self.begin
        if passed >= self.steps:
            return self.last
        unit = gcd(self.first, self.last)
        grown = (self.last - self.first) * passed // (unit * self.steps)
        return self.first + unit * grown

    def __str__(self) -> str:
        if not self.steps:
            return f"{self.last:,} tokens"
        end = self.begin + self.steps
        return f"{self.first:,} at step {self.begin:,} to {self.last:,} at step {end:,}"


def check_windows(windows: Iterable[int], alignment: int) -> None:
    """Refuse windows, in tokens, that would begin a piece where no segment may begin."""
    for window in windows:
        if window % alignment:
            raise ConfigError(
                f"attention_window {window} is no multiple of the alignment {alignment} (2 x "
                "context parallel size): pieces of a segment begin there, too"
            )


class Bounds(NamedTuple):
    """Where the segments of a micro batch begin and end, as the gather tells it."""

    cu_seqlens: NDArray[np.int32]
    """Lists one behind the other, each ascending from 0; a repeated last value is no segment."""
    cu_seqlens_padded: NDArray[np.int32] | None
    """The same with the room behind every segment, where segments are aligned."""
    dataset_ids: NDArray[np.int32]
    """Of every segment, -1 for padding."""
    max_seqlen: int
    """The longest segment with its room, tokens."""


def cut_bounds(bounds: Bounds, window: int, *, num_lists: int = 1, entries: int = 0) -> Bounds:
    """Boundaries of segments cut at multiples of a window from where each begins.

    Args:
        bounds: of whole segments.
        window: tokens, at least 1; a multiple of the alignment keeps it.
        num_lists: lists in cu_seqlens, of equally many entries.
        entries: fill every list with its last value to so many; 0: to those of the longest.

    Raises:
        ValueError: a list has more than ``entries``.
    """
    lengths = np.diff(bounds.cu_seqlens.reshape(num_lists, -1)).astype(np.int64)
    rooms = lengths
    if bounds.cu_seqlens_padded is not None:
        rooms = np.diff(bounds.cu_seqlens_padded.reshape(num_lists, -1)).astype(np.int64)
    row, _ = np.nonzero(rooms)
    lengths, rooms = lengths[rooms > 0], rooms[rooms > 0]
    counts = np.maximum(1, -(-lengths // window))
    segment = np.repeat(np.arange(len(counts)), counts)
    place = _places(counts)
    room = np.where(place == counts[segment] - 1, rooms[segment] - place * window, window)
    per_list = np.bincount(row[segment], minlength=num_lists)
    most = int(per_list.max()) + 1
    if entries and most > entries:
        raise ValueError(
            f"an attention window of {window} makes {most} entries of cu_seqlens, and there is "
            f"room for {entries}: raise num_cu_seqlens, or leave it out"
        )
    steps = np.zeros((2, num_lists, entries or most), np.int64)
    steps[:, row[segment], _places(per_list) + 1] = (
        np.minimum(lengths[segment] - place * window, window),
        room,
    )
    cut, padded = np.cumsum(steps, axis=2).astype(np.int32).reshape(2, -1)
    return Bounds(
        cu_seqlens=cut,
        cu_seqlens_padded=None if bounds.cu_seqlens_padded is None else padded,
        dataset_ids=bounds.dataset_ids[segment],
        max_seqlen=int(room.max()),
    )


def _places(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 .. count - 1 of every group, one behind the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def cut_lengths(lengths: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    """Lengths of the pieces of segments of these lengths, in any order; None cuts nothing."""
    if window is None:
        return lengths
    rest = lengths % window
    whole = np.full(int((lengths // window).sum()), window, np.int64)
    return np.concatenate([whole, rest[rest > 0]])
