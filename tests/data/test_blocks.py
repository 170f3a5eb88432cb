"""The order of an arranged source: every sample once per epoch, by blocks, mixed well enough."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack import _core
from megapack.data.sample_order import BlockOrder, Epochs
from megapack.packing.sharded import Arranged


def order_of(size: int, block: int, window: int) -> Epochs:
    sizes = Arranged(source="", seed=0, block_tokens=block * 16, window_blocks=window)
    return Epochs(size, 7, BlockOrder(size, 16, sizes))


def key_of(epoch: int) -> int:
    return _core.random_bits(7, epoch)


def epoch_of(order: Epochs, epoch: int) -> np.ndarray:
    return order.samples(epoch * order.size, order.size)


def reference(size: int, block: int, window: int, epoch: int) -> list[int]:
    """An epoch by its definition: blocks in their order, windows of them mixed."""
    if epoch == 0:
        return list(range(size))
    key, number = key_of(epoch), -(-size // block)
    blocks = _core.permute_range(key, number, 0, number).tolist()
    result: list[int] = []
    for slot in range(0, number, window):
        own = [i for b in blocks[slot : slot + window] for i in range(b * block, (b + 1) * block)]
        own = [i for i in own if i < size]
        bits = _core.random_bits(key, len(result) + 1)
        mixed = _core.permute_range(bits, len(own), 0, len(own))
        result += [own[i] for i in mixed.tolist()]
    return result


@given(
    size=st.integers(1, 200),
    block=st.integers(1, 12),
    window=st.integers(1, 6),
    begin=st.integers(0, 700),
    count=st.integers(0, 300),
)
def test_any_range_of_it_is_that_of_the_definition_and_places_invert_it(
    size: int, block: int, window: int, begin: int, count: int
) -> None:
    order = order_of(size, block, window)
    last = (begin + count) // size + 1
    every = [i for epoch in range(last) for i in reference(size, block, window, epoch)]
    assert order.samples(begin, count).tolist() == every[begin : begin + count]
    for epoch in range(min(3, last)):
        samples = np.array(reference(size, block, window, epoch))
        assert sorted(samples.tolist()) == list(range(size))
        places = order.places(epoch, samples)
        assert places.tolist() == list(range(size))


BLOCK, WINDOW = 64, 16


@pytest.mark.parametrize("size", [BLOCK * 40, BLOCK * 40 + 17])
def test_later_epochs_are_as_independent_as_shuffles_of_blocks(size: int) -> None:
    """Permutation statistics of 200 epochs beside those of the ordinary shuffle.

    Where a sample stands is uniform. The rank correlation of two epochs scatters around 0 as that
    of n independent things, 1 / sqrt(n): of so many blocks here, of so many samples in a shuffle.
    """
    order, num_epochs = order_of(size, BLOCK, WINDOW), 200
    epochs = np.array([epoch_of(order, e) for e in range(1, num_epochs + 1)])
    shuffles = np.array([_core.permute_range(key_of(e), size, 0, size) for e in range(num_epochs)])
    for drawn, independent in ((epochs, size / BLOCK), (shuffles, size)):
        places = np.argsort(drawn, axis=1)
        tenths = places * 10 // size
        counts = np.array([np.bincount(column, minlength=10) for column in tenths[:, ::37].T])
        chi = ((counts - num_epochs / 10) ** 2 / (num_epochs / 10)).sum(axis=1)
        assert 7 < chi.mean() < 11, "9 degrees of freedom"
        centred = places - places.mean()
        rho = (centred[1:] * centred[:-1]).mean(axis=1) / centred.var() * independent**0.5
        assert 0.75 < rho.std() < 1.25 and abs(rho.mean()) < 4 / num_epochs**0.5


def test_who_shares_a_step_with_whom_is_what_windows_make_of_it() -> None:
    """In a step two samples are of one block as often as any two of a window are. They were in one
    step of the epoch before if they lay in one window then, which those of one block always do.
    """
    num_blocks, step = 48, 32
    order = order_of(BLOCK * num_blocks, BLOCK, WINDOW)
    pairs = again = of_block = 0
    before = np.argsort(epoch_of(order, 1))
    upper = np.triu_indices(step, 1)
    for epoch in range(2, 80):
        drawn = epoch_of(order, epoch)
        for i in range(0, order.size, step * 4):
            own = drawn[i : i + step]
            steps, blocks = before[own] // step, own // BLOCK
            again += int((steps[:, None] == steps)[upper].sum())
            of_block += int((blocks[:, None] == blocks)[upper].sum())
            pairs += len(upper[0])
        before = np.argsort(drawn)
    share = of_block / pairs
    assert share == pytest.approx(1 / WINDOW, rel=0.05)
    in_window = share + (1 - share) * (WINDOW - 1) / (num_blocks - 1)
    assert again / pairs == pytest.approx(in_window * step / (WINDOW * BLOCK), rel=0.1)
