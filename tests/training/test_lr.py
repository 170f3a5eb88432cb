"""Learning rates are a pure function of the step, continuous, and reach what was asked."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.training.config import LearningRateConfig

KINDS = ["cosine", "linear", "wsd", "constant"]


def _rates(num_steps: int, **fields: object) -> list[float]:
    rate = LearningRateConfig(**fields)  # type: ignore[arg-type]
    return [rate.at(i, num_steps=num_steps, peak=2.0) for i in range(num_steps)]


@given(
    kind=st.sampled_from(KINDS),
    num_steps=st.integers(1, 300),
    warmup=st.integers(0, 100),
    min_ratio=st.floats(0, 1),
)
def test_rates_rise_then_fall(kind: str, num_steps: int, warmup: int, min_ratio: float) -> None:
    rates = _rates(num_steps, kind=kind, warmup_steps=warmup, min_ratio=min_ratio)
    warmup = min(warmup, num_steps)
    assert all(0 <= rate <= 2.0 + 1e-12 for rate in rates) and max(rates[:-1], default=1) > 0
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    if warmup:
        assert rates[warmup - 1] == pytest.approx(2.0)
    after = rates[warmup:]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
    if kind != "constant" and num_steps > warmup:
        assert rates[-1] == pytest.approx(2.0 * min_ratio, abs=1e-9)


def test_each_kind_in_numbers() -> None:
    assert _rates(4, kind="linear", warmup_steps=0, min_ratio=0.0) == [1.5, 1.0, 0.5, 0.0]
    assert _rates(4, kind="cosine", warmup_steps=2, min_ratio=0.0) == pytest.approx(
        [1.0, 2.0, 1.0, 0.0]
    )
    assert _rates(10, kind="wsd", warmup_steps=1, min_ratio=0.5, decay_fraction=0.2) == (
        pytest.approx([2.0] * 8 + [1.5, 1.0])
    )
    assert _rates(3, kind="constant", warmup_fraction=0.0) == [2.0] * 3


def test_warmup_is_given_in_steps_or_as_a_fraction() -> None:
    assert LearningRateConfig(warmup_fraction=0.05).warmup(1000) == 50
    assert LearningRateConfig(warmup_steps=7).warmup(1000) == 7
    assert LearningRateConfig(warmup_steps=7).warmup(5) == 5


def test_a_step_outside_of_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="step 3 is outside"):
        LearningRateConfig().at(3, num_steps=3, peak=1.0)
