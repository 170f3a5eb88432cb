"""Random plans of every option keep the laws, and those of few documents are (nearly) the best that
there are.

MEGAPACK_PLANS=20000 runs the longer form: so many plans, and 500 steps against the optimum.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from reference.planning import broken_laws, least_objectives

from megapack.planning import plan_step

PLANS = int(os.environ.get("MEGAPACK_PLANS", "2000"))
PARTS = 8
BALANCES = ("micro_batches", "step", "pipeline")


def random_step(seed: int) -> tuple[list[int], dict[str, Any], list[int] | None]:
    """Lengths, options and groups; small numbers, so that caps are met exactly."""
    generator = np.random.default_rng(seed)

    def below(n: int) -> int:
        return int(generator.integers(n))

    num_ranks, max_tokens = 1 + below(12), 1 + below(60)
    degrees = [d for d in (1, 1, 2, 4, 8) if d <= num_ranks]
    max_degree = degrees[below(len(degrees))]
    longest = 1 + below(max_tokens * (max_degree if below(2) else 1))
    lengths = generator.integers(1, longest + 1, below(50)).tolist()
    options: dict[str, Any] = {
        "num_ranks": num_ranks,
        "max_tokens_per_rank": max_tokens,
        "max_degree": max_degree,
        "max_documents_per_rank": 1 + below(8) if below(2) else None,
        "linear_length": (0, 10, 1 << 20)[below(3)],
        "balance": BALANCES[below(3)],
        "micro_batch_multiple": 1 + below(3) if below(4) == 0 else 1,
    }
    if below(2):
        kinds = 1 + below(3)
        costs = generator.integers(0, 9, (len(lengths), kinds)) * generator.choice([0, 1, 0.25])
        options["costs"] = costs
        if below(2):  # a document costs up to 8, shared by ranks at least as much as one may have
            options["max_costs_per_rank"] = (8 + generator.integers(0, 20, kinds)).tolist()
    groups = None
    if below(3) == 0:
        groups = generator.integers(0, 12, len(lengths)).tolist()
        if max_degree > 1:  # such that ranks hold each as a whole
            options.pop("max_costs_per_rank", None)
            room = dict.fromkeys(range(12), max_degree * max_tokens)
            places = dict.fromkeys(range(12), options["max_documents_per_rank"] or 99)
            for i, group in enumerate(groups):
                if room[group] < lengths[i] or places[group] == 0:
                    groups[i] = 100 + i
                else:
                    room[group] -= lengths[i]
                    places[group] -= 1
    return lengths, options, groups


@pytest.mark.parametrize("part", range(PARTS))
def test_random_plans_keep_the_laws(part: int) -> None:
    for seed in range(part, PLANS, PARTS):
        lengths, options, groups = random_step(seed)
        plan = plan_step(lengths, **options, groups=groups)
        held = sorted(i for rank in plan.index_lists() for batch in rank for i in batch.tolist())
        assert held == np.repeat(np.arange(len(lengths)), plan.degree).tolist(), seed
        broken = broken_laws(
            plan,
            options["max_tokens_per_rank"],
            options["max_degree"],
            options["max_documents_per_rank"] or len(lengths),
            costs=options.get("costs"),
            max_costs=options.get("max_costs_per_rank"),
            groups=groups,
            multiple=options["micro_batch_multiple"],
        )
        assert not broken, (seed, broken)
        needed = -(-sum(lengths) // (options["num_ranks"] * options["max_tokens_per_rank"]))
        assert plan.num_micro_batches >= needed


def few_documents(seed: int) -> tuple[list[int], int]:
    """8 to 10 lengths, and the tokens of a rank: two or three micro batches of two ranks, 77 to
    97 % full."""
    generator = np.random.default_rng(seed)
    count, num_micro_batches = int(generator.integers(8, 11)), int(generator.integers(2, 4))
    if seed % 2:
        lengths = 256 * generator.integers(4, 129, count)
    else:
        lengths = np.minimum(generator.lognormal(9, 0.9, count), 32_768).astype(np.int64) + 1
    room = int(lengths.sum() * generator.uniform(1.03, 1.3) / (2 * num_micro_batches))
    return lengths.tolist(), max(room, int(lengths.max()))


def test_plans_of_few_documents_are_nearly_the_optimum() -> None:
    ratios: dict[str, list[float]] = {balance: [] for balance in BALANCES}
    for seed in range(PLANS // 40):
        lengths, room = few_documents(seed)
        cost = [n * (24_576 + n) for n in lengths]
        for num_micro_batches in range(-(-sum(lengths) // (2 * room)), 9):
            least = least_objectives(lengths, cost, num_micro_batches, room)
            if least["step"] < np.inf:
                break
        for balance in BALANCES:
            plan = plan_step(
                lengths, num_ranks=2, max_tokens_per_rank=room, linear_length=24_576,
                balance=balance,  # type: ignore[arg-type]
            )  # fmt: skip
            assert plan.num_micro_batches == num_micro_batches, (seed, balance)
            of = plan.cost(24_576)
            found = {
                "micro_batches": of.max(axis=1).sum(),
                "step": of.sum(axis=0).max(),
                "pipeline": of.max(),
            }
            ratios[balance].append(float(found[balance]) / least[balance])
    for balance, each in ratios.items():
        assert min(each) > 1 - 1e-9, f"{balance}: better than the optimum"
        assert np.mean(each) <= 1.005, balance
        assert max(each) <= 1.03, balance


def test_the_optimum_of_a_step_that_is_counted_by_hand() -> None:
    """3 and 2 + 1 in one micro batch, 4 and 4 in the other: 3 + 4; ranks with 3 + 4 each."""
    least = least_objectives([4, 4, 3, 2, 1], [4, 4, 3, 2, 1], 2, 4)
    assert least == {"micro_batches": 7.0, "step": 7.0, "pipeline": 4.0}
    assert least_objectives([4, 4, 4], [4, 4, 4], 2, 9)["step"] == np.inf  # a place is empty
