"""The cost model against figures worked out by hand."""

from __future__ import annotations

import math

import pytest

from megapack.compare.cost import (
    GPUS,
    MODELS,
    Breakdown,
    BucketWork,
    Gpu,
    Model,
    TrainingRun,
    estimate,
)

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
    return estimate(
        [bucket(**changes)],
        num_tokens=tokens,
        dropped_tokens=dropped,
        repeated_tokens=repeated,
        run=run,
    )


def test_every_part_of_the_bill_equals_the_hand_computed_one() -> None:
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


def test_random_dealing_waits_longer() -> None:
    balanced = bill(TrainingRun(model=UNIT, gpu=SLOW))
    random = bill(TrainingRun(model=UNIT, gpu=SLOW, dealing="random"))
    assert random.waiting == pytest.approx(5 * balanced.waiting)


def test_repeated_tokens_are_paid_for_and_are_not_training_data() -> None:
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


def test_a_dense_model_of_the_usual_kind_costs_what_everybody_computes() -> None:
    """7B parameters, 1T tokens, no attention: 6 N D = 4e22; H100 at 40 % does 3.956e14 per s."""
    model = Model(name="7B", parameters=7e9, num_layers=32, attention_width=4096)
    run = TrainingRun(model=model, gpu=GPUS["h100"], num_gpus=1024, train_tokens=1e12)
    got = bill(run, tokens=40, segment_squares=0, work=0)
    assert got.gpu_hours == pytest.approx(4.2e22 / 3.956e14 / 3600, rel=1e-3)
    assert got.cost == pytest.approx(2 * got.gpu_hours)


def test_relative_speed_by_context_length_is_what_bucketllm_measured() -> None:
    """Table 3 (1B model, A800): tokens/s relative to a context of 8192, within 3 %."""
    measured = {1024: 16_793, 2048: 16_263, 4096: 15_505, 8192: 13_696, 16384: 11_129}
    model = MODELS["1b"]
    per_token = {n: model.flops_per_token + model.flops_per_square * n for n in measured}
    for length, speed in measured.items():
        assert per_token[8192] / per_token[length] == pytest.approx(speed / 13_696, rel=0.03)


def test_presets_are_positive_and_grow() -> None:
    sizes = [model.parameters for model in MODELS.values()]
    assert sizes == sorted(sizes)
    assert all(math.isfinite(gpu.peak_flops) and gpu.peak_flops > 5e13 for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_gpus": 0}, "num_gpus is 0"),
        ({"utilization": 0.0}, "utilization is 0.0"),
        ({"utilization": 40.0}, "it is a share"),
        ({"price_per_gpu_hour": -1.0}, "price_per_gpu_hour is -1.0"),
        ({"train_tokens": 0.0}, "train_tokens is 0"),
    ],
)
def test_impossible_runs_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingRun(model=UNIT, gpu=SLOW, **changes)  # type: ignore[arg-type]


def test_impossible_models_and_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Model(name="none", parameters=0, num_layers=1, attention_width=1)
    with pytest.raises(ValueError, match="must be > 0"):
        Gpu(name="none", peak_flops=0)


def test_an_index_without_tokens_has_no_cost() -> None:
    with pytest.raises(ValueError, match="nothing to train on"):
        bill(TrainingRun(model=UNIT, gpu=SLOW), tokens=5, dropped=5)
