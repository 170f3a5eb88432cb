"""The order of an arranged source: straight through once, then by shuffled blocks.

``megapack-build arrange`` writes the samples of every bucket in one random order, which the first
epoch takes as it is. A later epoch takes the blocks of a bucket, consecutive samples of about
``block_tokens`` tokens, in a random order, and shuffles the samples inside every window of
``window_blocks`` of these. So files are read by whole blocks in every epoch, and since which
samples are together in a block is random, so is what a step holds; what it is not is independent of
the epoch before: samples of one block come close to each other again
(tests/data/test_blocks.py measures how close).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.packing.shards import Arranged

__all__ = ["BlockOrder"]

Ids = NDArray[np.int64]


class BlockOrder:
    """The samples of one bucket of an arranged source, epoch after epoch.

    Args:
        size: samples of the bucket.
        capacity: tokens of each.
        arranged: sizes of blocks and windows.
    """

    def __init__(self, size: int, capacity: int, arranged: Arranged) -> None:
        self.size = size
        self.block = max(1, arranged.block_tokens // capacity)
        self.window = arranged.window_blocks
        self.num_blocks = -(-size // self.block)

    def samples(self, key_of: Callable[[int], int], begin: int, count: int) -> Ids:
        """Samples at positions [begin, begin + count) of the endless sequence of epochs.

        Args:
            key_of: epoch -> key of its shuffle.
        """
        result, done = np.empty(count, np.int64), 0
        while done < count:
            epoch, place = divmod(begin + done, self.size)
            number = min(count - done, self.size - place)
            if epoch == 0:
                result[done : done + number] = np.arange(place, place + number)
            else:
                key = key_of(epoch)
                first, window = self._window_of(key, place)
                number = min(number, first + len(window) - place)
                mixed = _core.permute_range(
                    _core.random_bits(key, first + 1), len(window), place - first, number
                )
                result[done : done + number] = window[mixed]
            done += number
        return result

    def places(self, epoch: int, key: int, samples: Ids) -> Ids:
        """Where some samples stand in an epoch, given its key."""
        if epoch == 0:
            return samples
        slots = _core.permute_inverse(key, self.num_blocks, samples // self.block)
        result = np.empty_like(samples)
        for number in np.unique(slots // self.window).tolist():
            mine = slots // self.window == number
            first, window = self._window(key, number)
            order = np.argsort(window)
            inside = order[np.searchsorted(window, samples[mine], sorter=order)]
            bits = _core.random_bits(key, first + 1)
            result[mine] = first + _core.permute_inverse(bits, len(window), inside)
        return result

    def _window_of(self, key: int, place: int) -> tuple[int, Ids]:
        """The window that a place of an epoch lies in, as of ``_window``."""
        number = place // (self.block * self.window)
        first, window = self._window(key, number)
        if place >= first + len(window):  # the short block came before
            first, window = self._window(key, number + 1)
        return first, window

    def _window(self, key: int, number: int) -> tuple[int, Ids]:
        """Where a window of an epoch begins, and its samples before they are mixed."""
        slot = number * self.window
        blocks = _core.permute_range(
            key, self.num_blocks, slot, min(self.window, self.num_blocks - slot)
        )
        last = self.num_blocks - 1  # the block that may be short
        lacking = self.num_blocks * self.block - self.size
        came_before = int(_core.permute_inverse(key, self.num_blocks, np.array([last]))[0]) < slot
        begins = blocks * self.block
        parts = [np.arange(b, min(b + self.block, self.size)) for b in begins.tolist()]
        return slot * self.block - lacking * came_before, np.concatenate(parts)
