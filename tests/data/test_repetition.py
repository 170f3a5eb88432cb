"""Repeats of sources: weights that keep to max_epochs, and warnings of a plan."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.programs import weights_within_epochs

from megapack.data import BucketBatchSampler, Schedule
from megapack.data.blend import Mixture, Ramp, Source, Stage, load_blend
from megapack.data.program import resolve, within_epochs
from megapack.data.report import check_epochs, often_repeated, plan_run
from megapack.data.sources import SampleSource
from megapack.data.steps import ScheduleConfig
from megapack.errors import ConfigError, ResumeError
from tests.data.corpora import of_rank, packed_index

PROGRAMS = int(os.environ.get("MEGAPACK_PROGRAMS", "100"))
SIZES = (100, 1000, 10_000)


def test_weights_equal_the_example_of_unimax() -> None:
    config = ScheduleConfig(tokens_per_step=100)
    mixture = Mixture(weights=[1, 1, 1], max_epochs=4, run_tokens=9000).of(["a", "b", "c"])
    [stage] = within_epochs(resolve(config, mixture), mixture, SIZES)
    assert np.allclose(np.multiply(stage.weights, 9000), [400, 4000, 4600], rtol=1e-15)


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_limits_that_allow_nothing_are_refused(limit: float) -> None:
    """A mixture refuses the same limits as a manifest."""
    with pytest.raises(ConfigError, match="source 'b': max_epochs is"):
        Mixture(max_epochs=[1, limit]).of(["a", "b"])
    assert Mixture(max_epochs=math.inf, run_tokens=1).of(["a"]).max_epochs == [math.inf]
    with pytest.raises(ConfigError, match="the run: run_tokens is 0; it must be above 0"):
        Mixture(max_epochs=1, run_tokens=0).of(["a"])


def random_mixture(random: np.random.Generator) -> tuple[Mixture, list[int]]:
    count = int(random.integers(1, 6))
    names = [f"s{i}" for i in range(count)]
    weights = random.choice([0.1, 1, 1, 3.5], count).tolist()
    stages, begin = [], 0
    for _ in range(int(random.integers(0, 4))):
        begin += int(random.integers(1, 12))
        drawn = random.choice(names, random.integers(1, count + 1), replace=False).tolist()
        changes: list[dict[str, Any]] = [
            {"tokens_per_step": int(random.choice([50, 100]))},
            {"weights": dict.fromkeys(drawn, float(random.choice([1, 2])))},
            {"skip_steps": 3},
        ]
        change = changes[int(random.integers(3))]
        ends = begin
        if "weights" in change and random.random() < 0.5:
            ends += 4
            change["ramp"] = Ramp(until_step=ends, pieces=2)
        stages.append(Stage(from_step=begin, **change))
        begin = ends
    limits = [None if random.random() < 0.3 else float(random.choice([0.5, 1, 4])) for _ in names]
    limited = {"max_epochs": limits, "run_tokens": int(random.integers(1, 6000))}
    mixture = Mixture(weights=weights, names=names, stages=stages, **limited).of(names)
    return mixture, random.integers(10, 3000, count).tolist()


def test_weights_equal_the_definition() -> None:
    """Also: no source is above its limit while another has tokens left, and an appended stage
    changes no earlier weight."""
    config, num_limited = ScheduleConfig(tokens_per_step=100), 0
    for number in range(PROGRAMS):
        mixture, tokens = random_mixture(np.random.default_rng(number))
        program = resolve(config, mixture)
        limited = within_epochs(program, mixture, tokens)
        wanted = [(stage.begin, stage.config.tokens_per_step, stage.weights) for stage in program]
        limits = mixture.max_epochs
        expected = weights_within_epochs(wanted, limits, tokens, mixture.run_tokens)
        for stage, shares in zip(limited, expected, strict=True):
            stage_weights = np.array(stage.weights)
            assert np.allclose(
                stage_weights / stage_weights.sum(), [float(s) for s in shares], rtol=1e-9
            ), number
        num_limited += limited != program
        later = Stage(from_step=program[-1].begin + 7, weights={"s0": 1.0})
        longer = Mixture(**{**mixture.__dict__, "stages": [*mixture.stages, later]})
        again = within_epochs(resolve(config, longer), longer, tokens)
        assert again[: len(limited)] == limited, number
    assert num_limited > PROGRAMS // 3


INDICES = [packed_index(count, seed=seed) for seed, count in enumerate([40, 400, 2000])]


def schedule(run_steps: int | None, **mixture: object) -> Schedule:
    tokens = None if run_steps is None else run_steps * 512
    samples = SampleSource(INDICES, Mixture(names=["a", "b", "c"], run_tokens=tokens, **mixture))
    return Schedule(samples, tokens_per_step=512, seed=3)


def test_sources_reach_their_limits_exactly() -> None:
    steps = 300
    limited = schedule(steps, weights=[1, 1, 1], max_epochs=[4, 2.5, None])
    check_epochs(limited, steps)
    plan = plan_run(limited, steps)
    small, middle, large = plan.datasets
    # A blend may be off by one step's tokens per bucket.
    tokens = limited.samples.tokens_per_epoch.tolist()
    assert abs(small.tokens - 4 * tokens[0]) < 3 * 512 > abs(middle.tokens - 2.5 * tokens[1])
    assert large.tokens == steps * 512 - small.tokens - middle.tokens
    assert small.repeated == 0.75 and f"{large.repeated:.2%}" in plan.table()
    assert large.repeated == pytest.approx(1 - 1 / large.epochs, abs=0.01)


def test_a_run_longer_than_run_tokens_is_refused_with_its_length() -> None:
    planned = schedule(200, weights=[1, 1, 1], max_epochs=4)
    check_epochs(planned, 200)
    with pytest.raises(ConfigError, match="run_tokens, which is 102,400, to 460,800 so that"):
        check_epochs(planned, 900)
    with pytest.raises(ConfigError, match=r"max_epochs is 4.* set run_tokens to 102,400"):
        check_epochs(schedule(None, weights=[1, 1, 1], max_epochs=4), 200)
    once = schedule(900, weights=[1, 1, 1], max_epochs=1)  # no tokens remain
    with pytest.raises(ConfigError, match=r"max_epochs is 1\b.*run fewer"):
        BucketBatchSampler(once, **of_rank(micro=512, num_steps=900))


def test_limits_apply_to_drawn_samples() -> None:
    """Each stage may exceed them by a draw; evaluation has every sample once."""
    later = [Stage(from_step=900 + i, weights={"a": 1, "b": 1 + i}) for i in range(399)]
    for stages in ((), later):
        with pytest.raises(ConfigError, match="would repeat source a"):
            check_epochs(schedule(None, weights=[1, 1, 1], max_epochs=4, stages=stages), 100)
    samples = SampleSource(INDICES, Mixture(max_epochs=0.5))
    check_epochs(finite := Schedule(samples, tokens_per_step=512, finite=True), finite.num_steps())
    with pytest.raises(ConfigError, match="weight of index 1 is nan; it must be finite"):
        schedule(200, weights=[1, math.nan, 1], max_epochs=4)


def test_limits_are_part_of_the_resume_identity() -> None:
    limited = schedule(200, weights=[1, 1, 1], max_epochs=4)
    state = limited.state_dict(100)
    assert state["weights"] != [1, 1, 1] and limited.resume_step(state) == 100
    with pytest.raises(ResumeError, match="weights was"):
        schedule(240, weights=[1, 1, 1], max_epochs=4).resume_step(state)


def test_plan_warns_of_many_repeats() -> None:
    lines = often_repeated(plan_run(schedule(None, weights=[1, 1, 20]), 600))
    assert [line.split(" is seen")[0][-8:] for line in lines] == ["source a", "source c"]
    assert "2605.12715" in lines[0] and "2305.16264" in lines[1]
    alone = Schedule(INDICES[0], tokens_per_step=64)
    assert not often_repeated(plan_run(alone, alone.num_steps(3)))


def test_manifest_has_max_epochs_for_all_and_per_source(tmp_path: Path) -> None:
    path = tmp_path / "blend.yaml"
    path.write_text(
        "max_epochs: 4\nrun_tokens: 1000\n"
        "sources: [{prefix: a, index: a.samples}, {prefix: b, index: b.samples, max_epochs: 1.5}]\n"
    )
    assert load_blend(path).limits == [4, 1.5]
    path.write_text("run_tokens: 1000\nsources: [{prefix: a, index: a.samples}]\n")
    with pytest.raises(ConfigError, match="run_tokens 1000 and no max_epochs"):
        load_blend(path)
    with pytest.raises(ConfigError, match="max_epochs"):
        Source(prefix="a", max_epochs=0)
