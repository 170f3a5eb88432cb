"""Attention work per sample, and how dealing spreads it over the ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.compare.cost import measure_work
from megapack.packing import SampleIndex, pack


def index_of(capacities: list[int], samples: list[list[list[int]]]) -> SampleIndex:
    """An index with these segment lengths: samples[bucket][sample] -> lengths."""
    flat = [sample for bucket in samples for sample in bucket]
    lengths = np.array([n for sample in flat for n in sample], np.int32)
    arrays = {
        "bucket_capacity": np.array(capacities, np.int64),
        "bucket_sample_offsets": np.cumsum([0] + [len(bucket) for bucket in samples]),
        "sample_segment_offsets": np.cumsum([0] + [len(sample) for sample in flat]),
        "segment_document": np.arange(len(lengths), dtype=np.int32),
        "segment_begin": np.zeros(len(lengths), np.int32),
        "segment_length": lengths,
    }
    return replace(pack([1], buckets=capacities), **arrays)


segments = st.lists(st.integers(1, 7), min_size=1, max_size=3)  # at most 21 of 24 tokens


@given(st.lists(segments, min_size=1, max_size=9))
def test_work_is_squared_segments_and_squared_padding(samples: list[list[int]]) -> None:
    (bucket,) = measure_work(index_of([24], [samples]), num_ranks=1, num_steps=1)
    assert bucket.segment_squares == sum(n * n for sample in samples for n in sample)
    paddings = sum((24 - sum(sample)) ** 2 for sample in samples)
    assert bucket.work == bucket.segment_squares + paddings
    assert bucket.imbalance_random == bucket.imbalance_balanced == 1.0  # one rank waits for none


def test_imbalance_by_hand() -> None:
    """Samples of 9 and 1 of 9 tokens on two ranks, one each: every step is 81+1, or two alike."""
    index = index_of([9], [[[9], [1]]])  # work 81 and 1 + 64
    (bucket,) = measure_work(index, num_ranks=2, tokens_per_rank=9, num_steps=2000)
    unequal, half = 2 * 81 / (81 + 65), 0.5  # of the draws, half take one of each
    expected = half * unequal + half * 1.0
    assert bucket.imbalance_random == pytest.approx(expected, abs=0.01)
    assert bucket.imbalance_balanced == bucket.imbalance_random  # one sample each: nothing to deal


def test_buckets_are_measured_apart_and_empty_ones_left_out() -> None:
    index = index_of([10, 20, 40], [[[6, 4], [7]], [], [[20, 10]]])
    small, large = measure_work(index, num_ranks=2, tokens_per_rank=20, num_steps=4)
    assert (small.capacity, small.num_samples, small.samples_per_rank) == (10, 2, 2)
    assert (small.segment_squares, small.work) == (36 + 16 + 49, 36 + 16 + 49 + 9)
    assert (small.num_positions, small.sample_squares) == (20, 200)
    assert (large.capacity, large.samples_per_rank) == (40, 1)  # one sample is the least
    assert (large.segment_squares, large.work) == (500, 600)
    assert large.imbalance_random == large.imbalance_balanced == 1.0  # one kind of sample


def test_balanced_dealing_is_fairer_on_unequal_samples() -> None:
    generator = np.random.default_rng(1)
    samples = [[int(n)] for n in generator.integers(1, 1000, 500)]
    (bucket,) = measure_work(index_of([1000], [samples]), num_ranks=8, tokens_per_rank=4000)
    assert 1.0 <= bucket.imbalance_balanced < bucket.imbalance_random
    assert bucket.imbalance("balanced") == bucket.imbalance_balanced
    assert bucket.imbalance("random") == bucket.imbalance_random


def test_the_estimate_is_a_function_of_the_index() -> None:
    index = index_of([100], [[[n] for n in range(1, 90)]])
    assert measure_work(index, num_ranks=4) == measure_work(index, num_ranks=4)


@pytest.mark.parametrize("wrong", ["num_ranks", "tokens_per_rank", "num_steps"])
def test_counts_below_one_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong}.* 0"):
        measure_work(index_of([10], [[[5]]]), **{wrong: 0})
