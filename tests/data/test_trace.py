"""Questions about a run, answered without going through it."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack import _core
from megapack.data import Schedule, Stage
from megapack.errors import ConfigError
from tests.data.corpora import packed_index, samples_of_buckets
from tests.data.test_programs import check_steps_of


@given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_permutation_is_inverted(size: int, key: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 1))
    values = _core.permute_range(key, size, first, size - first)
    assert _core.permute_inverse(key, size, values).tolist() == [*range(first, size)]


@pytest.mark.parametrize("order", ["proportional", "grow-p2", "sequential"])
@pytest.mark.parametrize(("window", "skip"), [(1, 0), (3, 0), (3, 4)])
def test_windows_orders_and_micro_steps_are_inverted_too(
    order: str, window: int, skip: int
) -> None:
    schedule = Schedule(
        [samples_of_buckets({4: 9, 8: 30, 16: 3}), samples_of_buckets({8: 7})],
        weights=[1, 2],
        tokens_per_step=64,
        mix="micro_step",
        micro_step_tokens=32,
        order=order,
        cost_window=window,
        stages=[Stage(from_step=5, skip_steps=skip)],
    )
    check_steps_of(schedule, 33)


def test_a_sample_far_ahead_is_found_by_itself() -> None:
    index = samples_of_buckets({8: 2000, 16: 1500})
    schedule = Schedule([index, index], weights=[1, 1e-3], tokens_per_step=160)
    far = 10**9
    step = schedule.step(far)
    sample = int(step.sample_ids[3])
    stage = schedule.stages[0]
    bucket, turn = stage.draws.locate(far)
    assert stage.draws.draw_at(bucket, turn) == far
    stream, count = stage.buckets[bucket], stage.samples_per_draw[bucket]
    assert stream.ids(turn * count + 3, turn * count + 4).tolist() == [sample]


def test_every_sample_of_a_document_is_found() -> None:
    schedule = Schedule(
        [packed_index(300, (16, 32)), packed_index(200, (16, 32), 1)], tokens_per_step=64
    )
    held: dict[tuple[int, int], set[int]] = defaultdict(set)
    for sample in range(schedule.samples.num_samples):
        source, segments = schedule.samples.segments(sample)
        for document, _, _ in segments:
            held[source, document].add(sample)
    for (source, document), samples in held.items():
        assert schedule.samples.samples_of(source, document) == sorted(samples)
    assert any(len(samples) > 1 for samples in held.values())
    with pytest.raises(ConfigError, match=r"document 1000000 of .* counted from 0"):
        schedule.samples.samples_of(0, 10**6)
