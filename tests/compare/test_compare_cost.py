"""The cost model against values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.planning import broken_laws, costs

from megapack.compare.comparison import draw_steps, measure_plans
from megapack.compare.cost import (
    GPUS,
    MODELS,
    Breakdown,
    BucketWork,
    Gpu,
    Model,
    TrainingRun,
    estimate_cost,
    measure_work,
)
from megapack.errors import ConfigError, DataError
from megapack.packing import SampleIndex, pack
from megapack.planning import plan_step

# One parameter, one layer of width one: operations are 6 per token and 7 per squared token.
UNIT = Model(name="unit", parameters=1, num_layers=1, attention_width=1)
# 3600 operations per second at full use = 3600 * 3600 per GPU hour; half used.
SLOW = Gpu(name="slow", peak_flops=2.0)


def bucket(**changes: float) -> BucketWork:
    """4 samples of 10: segments 6+4 (52 squares) twice, 7 (49) + 3 padding (9) twice."""
    values = {
        "capacity": 10,
        "num_samples": 4,
        "segment_squares": 202,
        "work": 220,
        "samples_per_rank": 2,
        "imbalance_random": 1.5,
        "imbalance_balanced": 1.1,
    }
    return BucketWork(**{**values, **changes})  # type: ignore[arg-type]


def bill(
    run: TrainingRun, tokens: int = 34, dropped: int = 0, repeated: int = 0, **changes: float
) -> Breakdown:
    return estimate_cost(
        [bucket(**changes)],
        num_tokens=tokens,
        dropped_tokens=dropped,
        repeated_tokens=repeated,
        run=run,
    )


def test_breakdown_equals_values_by_hand() -> None:
    run = TrainingRun(model=UNIT, gpu=SLOW, num_gpus=4, utilization=0.5, price_per_gpu_hour=3.0)
    got = bill(run)
    assert run.flops_per_gpu_hour == 3600.0
    assert got.tokens == pytest.approx(6 * 34 / 3600)
    assert got.padding == pytest.approx(6 * 6 / 3600)
    assert got.repeated == 0
    assert got.attention == pytest.approx(7 * 202 / 3600)
    assert got.cross_attention == pytest.approx(7 * 18 / 3600)  # two paddings of 3
    assert got.waiting == pytest.approx(7 * 220 * 0.1 / 3600)
    assert got.gpu_hours == pytest.approx((6 * 40 + 7 * 220 * 1.1) / 3600)
    assert got.hours == pytest.approx(got.gpu_hours / 4)
    assert got.cost == pytest.approx(got.gpu_hours * 3.0)


def test_attention_over_whole_samples_costs_capacity_squared_and_never_waits() -> None:
    run = TrainingRun(model=UNIT, gpu=SLOW, utilization=0.5, attention="sample")
    got = bill(run)
    assert got.attention + got.cross_attention == pytest.approx(7 * 4 * 100 / 3600)
    assert got.waiting == 0


def test_random_assignment_waits_longer() -> None:
    balanced = bill(TrainingRun(model=UNIT, gpu=SLOW))
    random = bill(TrainingRun(model=UNIT, gpu=SLOW, dealing="random"))
    assert random.waiting == pytest.approx(5 * balanced.waiting)


def test_repeated_tokens_cost_but_do_not_count() -> None:
    run = TrainingRun(model=UNIT, gpu=SLOW, utilization=0.5, train_tokens=300)
    got = bill(run, tokens=30, repeated=4)
    assert got.num_passes == 10
    assert got.tokens == pytest.approx(10 * 6 * 30 / 3600)
    assert got.repeated == pytest.approx(10 * 6 * 4 / 3600)
    assert got.padding == pytest.approx(10 * 6 * 6 / 3600)


def test_a_strategy_that_drops_tokens_needs_more_passes_for_as_many() -> None:
    run = TrainingRun(model=UNIT, gpu=SLOW, utilization=0.5)
    got = bill(run, tokens=51, dropped=17)
    assert got.num_passes == 1.5
    assert got.tokens == pytest.approx(6 * 51 / 3600)
    assert got.padding == pytest.approx(1.5 * 6 * 6 / 3600)


def test_dense_model_costs_6nd() -> None:
    """7B parameters, 1T tokens, no attention: 6 N D = 4e22; H100 at 40 % does 3.956e14 per s."""
    model = Model(name="7B", parameters=7e9, num_layers=32, attention_width=4096)
    run = TrainingRun(model=model, gpu=GPUS["h100"], num_gpus=1024, train_tokens=1e12)
    got = bill(run, tokens=40, segment_squares=0, work=0)
    assert got.gpu_hours == pytest.approx(4.2e22 / 3.956e14 / 3600, rel=1e-3)
    assert got.cost == pytest.approx(2 * got.gpu_hours)


def test_relative_speed_by_length_matches_bucketllm() -> None:
    """Table 3 (1B model, A800): tokens/s relative to a context of 8192, within 3 %."""
    measured = {1024: 16_793, 2048: 16_263, 4096: 15_505, 8192: 13_696, 16384: 11_129}
    model = MODELS["1b"]
    per_token = {n: model.flops_per_token + model.flops_per_square * n for n in measured}
    for length, speed in measured.items():
        assert per_token[8192] / per_token[length] == pytest.approx(speed / 13_696, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_gpus": 0}, "num_gpus is 0"),
        ({"utilization": 0.0}, "utilization is 0.0"),
        ({"utilization": 40.0}, "above 0 and at most 1"),
        ({"price_per_gpu_hour": -1.0}, "price_per_gpu_hour is -1.0"),
        ({"price_per_gpu_hour": math.nan}, "price_per_gpu_hour is nan"),
        ({"train_tokens": 0.0}, "train_tokens is 0"),
        ({"train_tokens": math.inf}, "train_tokens is inf"),
    ],
)
def test_impossible_runs_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingRun(model=UNIT, gpu=SLOW, **changes)  # type: ignore[arg-type]


def test_impossible_models_and_gpus_are_refused() -> None:
    for wrong in (0, math.nan, math.inf):
        with pytest.raises(ValueError, match="it must be "):
            Model(name="none", parameters=wrong, num_layers=1, attention_width=1)
        with pytest.raises(ValueError, match="it must be "):
            Gpu(name="none", peak_flops=wrong)


def test_an_index_without_tokens_has_no_cost() -> None:
    with pytest.raises(ValueError, match="pack at least one token"):
        bill(TrainingRun(model=UNIT, gpu=SLOW), tokens=5, dropped=5)


# ---- Attention work per sample, and its imbalance over the ranks


def index_of(capacities: list[int], samples: list[list[list[int]]]) -> SampleIndex:
    """Return an index with these segment lengths: samples[bucket][sample] -> lengths."""
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
    assert bucket.imbalance_random == bucket.imbalance_balanced == 1.0  # a single rank never waits


def test_imbalance_by_hand() -> None:
    """Samples of 9 and 1 of 9 tokens on two ranks, one each: every step is 81+1, or two alike."""
    index = index_of([9], [[[9], [1]]])  # work 81 and 1 + 64
    (bucket,) = measure_work(index, num_ranks=2, tokens_per_rank=9, num_steps=2000)
    unequal, half = 2 * 81 / (81 + 65), 0.5  # of the draws, half take one of each
    expected = half * unequal + half * 1.0
    assert bucket.imbalance_random == pytest.approx(expected, abs=0.01)
    assert (
        bucket.imbalance_balanced == bucket.imbalance_random
    )  # one sample each: nothing to balance


def test_buckets_are_measured_separately_without_empty_ones() -> None:
    index = index_of([10, 20, 40], [[[6, 4], [7]], [], [[20, 10]]])
    small, large = measure_work(index, num_ranks=2, tokens_per_rank=20, num_steps=4)
    assert (small.capacity, small.num_samples, small.samples_per_rank) == (10, 2, 2)
    assert (small.segment_squares, small.work) == (36 + 16 + 49, 36 + 16 + 49 + 9)
    assert (small.num_positions, small.sample_squares) == (20, 200)
    assert (large.capacity, large.samples_per_rank) == (40, 1)  # one sample is the least
    assert (large.segment_squares, large.work) == (500, 600)
    assert large.imbalance_random == large.imbalance_balanced == 1.0  # one kind of sample


def test_balanced_assignment_is_better_on_unequal_samples() -> None:
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


# ---- Steps planned by documents


LINEAR_COST_TOKENS = MODELS["125m"].linear_cost_tokens
RULES: dict[str, Any] = {
    "num_ranks": 6,
    "tokens_per_rank": 4096,
    "micro_batch_tokens": 512,
    "linear_cost_tokens": LINEAR_COST_TOKENS,
    "num_steps": 3,
}


def web_lengths() -> np.ndarray:
    """Return lengths with a heavy tail, empty documents, and one too long for four ranks."""
    generator = np.random.default_rng(4)
    return np.append(generator.lognormal(4.5, 1.2, 5000).astype(np.int32), [0, 0, 3000])


def cut(lengths: list[int], limit: int) -> list[int]:
    pieces = []
    for length in lengths:
        pieces += [limit] * (length // limit) + [length % limit] * (length % limit > 0)
    return pieces


def test_planned_work_equals_a_recomputation_by_document() -> None:
    lengths = web_lengths()
    steps = draw_steps(lengths, tokens=6 * 4096, longest=4 * 512, num_steps=3)
    works = measure_plans(lengths, **RULES)
    assert [work.max_context_parallel_size for work in works] == [1, 4]
    for work in works:
        limit = 512 * work.max_context_parallel_size
        rows = []
        for step in steps:
            pieces = cut(step.tolist(), limit)
            plan = plan_step(
                pieces,
                num_ranks=6,
                max_tokens_per_rank=512,
                max_context_parallel_size=work.max_context_parallel_size,
                linear_cost_tokens=LINEAR_COST_TOKENS,
            )
            assert not broken_laws(plan, 512, work.max_context_parallel_size, len(pieces))
            row = [sum(n for n, d in zip(pieces, plan.degree, strict=True) if d > 1) / sum(pieces)]
            row += [plan.num_micro_batches, plan.num_micro_batches - -(-sum(pieces) // (6 * 512))]
            for spent in (costs(plan, 0), costs(plan, LINEAR_COST_TOKENS)):
                ideal = sum(map(sum, spent)) / 6
                busiest = max(sum(micro[rank] for micro in spent) for rank in range(6))
                row += [sum(map(max, spent)) / ideal, busiest / ideal]
            rows.append(row)
        shared, micro, extra, *paths = np.mean(rows, axis=0)
        assert work.num_steps == 3 and work.micro_batch_tokens == 512
        assert work.split_ratio == sum(n > limit for n in lengths.tolist()) / len(lengths)
        assert work.shared_ratio == pytest.approx(shared)
        assert (work.micro_batches, work.extra_micro_batches) == pytest.approx((micro, extra))
        found = [
            path
            for which in (work.attention, work.model)
            for path in (which.per_micro_batch, which.per_step)
        ]
        assert found == pytest.approx(paths) and min(found) >= 1
    assert works[0].shared_ratio == 0 < works[1].shared_ratio, "the case must share documents"
    assert works[0].split_ratio > works[1].split_ratio > 0


def test_equal_documents_need_no_balancing() -> None:
    one, all_ranks = measure_plans(
        np.full(9, 5), num_ranks=2, tokens_per_rank=20, micro_batch_tokens=10, linear_cost_tokens=7
    )
    for work in (one, all_ranks):
        assert (work.micro_batches, work.extra_micro_batches) == (2, 0)
        assert work.model.per_step == work.attention.per_micro_batch == 1.0
    assert one.split_ratio == one.shared_ratio == 0


def test_large_documents_cost_micro_batches() -> None:
    (work,) = measure_plans(
        np.full(9, 5), num_ranks=1, tokens_per_rank=24, micro_batch_tokens=8, linear_cost_tokens=0
    )
    assert (work.max_context_parallel_size, work.micro_batches, work.extra_micro_batches) == (
        1,
        4,
        1,
    )


def test_the_fewest_ranks_that_hold_the_longest_document_have_a_row() -> None:
    rules = {**RULES, "num_ranks": 64, "num_steps": 1}
    for longest, degrees in ((512, [1, 64]), (513, [1, 2, 64]), (2048, [1, 4, 64])):
        works = measure_plans(np.array([3, longest]), **rules)
        assert [work.max_context_parallel_size for work in works] == degrees
        assert works[-1].split_ratio == 0


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=20).filter(any),
    longest=st.integers(1, 40),
    spare=st.integers(0, 80),
)
def test_drawn_step_is_full(lengths: list[int], longest: int, spare: int) -> None:
    tokens = longest + spare
    pieces = {piece for length in lengths for piece in cut([length], longest)}
    steps = draw_steps(np.array(lengths), tokens=tokens, longest=longest, num_steps=4)
    assert len(steps) == 4
    for step in steps:
        assert set(step.tolist()) <= pieces and tokens - longest < step.sum() <= tokens
    again = draw_steps(np.array(lengths), tokens=tokens, longest=longest, num_steps=4)
    assert [s.tolist() for s in steps] == [s.tolist() for s in again]


def test_steps_of_very_many_documents_are_few() -> None:
    assert len(draw_steps(np.ones(9, int), tokens=1 << 19, longest=1, num_steps=32)) == 2
    assert len(draw_steps(np.ones(9, int), tokens=1 << 21, longest=1, num_steps=32)) == 1


def test_impossible_plans_are_refused() -> None:
    for name, value in (("num_ranks", 0), ("micro_batch_tokens", 0), ("micro_batch_tokens", 4097)):
        with pytest.raises(ConfigError, match=f"{name} (is )?{value}"):
            measure_plans(np.array([3]), **{**RULES, name: value})
    for nothing in ([], [0, 0]):
        with pytest.raises(DataError, match="no document has a token"):
            measure_plans(np.array(nothing, np.int64), **RULES)
