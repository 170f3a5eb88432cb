"""plan_step: laws of every plan, balance, determinism, and nearness to the optimum."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from reference.planning import broken_laws, costs, least_objectives

import megapack
from megapack.compare.cost import MODELS
from megapack.planning import StepPlan, StepPlanner, context_parallel_indices, plan_step

LINEAR_COST_TOKENS = 49_152.0  # 12 x 4,096


def web_lengths(num_tokens: int, seed: int, longest: int) -> Any:
    """Return lengths with a log-normal body and a heavy tail, like web pages, up to this sum."""
    generator = np.random.default_rng(seed)
    body = np.exp(6.4 + 0.85 * generator.standard_normal(num_tokens // 300))
    tail = 6000 * (1 + generator.pareto(2.0, body.size))
    lengths = np.where(generator.random(body.size) < 0.014, tail, body).astype(np.int64)
    lengths = np.clip(lengths, 56, longest)
    return lengths[np.cumsum(lengths) <= num_tokens]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_ranks", [16, 64])
def test_web_documents_need_fewest_micro_batches_and_balance(num_ranks: int, seed: int) -> None:
    """Steps that are almost full; documents up to 16 times a rank's limit."""
    lengths = web_lengths(num_ranks * 8 * 8192, seed, 131_072)
    assert lengths.sum() > 0.99 * num_ranks * 8 * 8192 and lengths.max() > 8192
    rules = {
        "num_ranks": num_ranks,
        "max_tokens_per_rank": 8192,
        "max_context_parallel_size": num_ranks,
    }
    plan = plan_step(lengths, **rules)
    assert not broken_laws(plan, 8192, num_ranks, len(lengths))
    assert plan.num_micro_batches == 8
    assert plan.critical_path(0.0).per_micro_batch < 1.15
    assert plan.critical_path(LINEAR_COST_TOKENS).per_micro_batch < 1.015


BALANCES = ("micro_batches", "step", "pipeline")


def answers(seed: int, count: int = 2048) -> Any:
    """Return answers to prompts in groups of 16, a step of RL (reasoning)."""
    generator = np.random.default_rng(seed)
    tokens = np.minimum(generator.lognormal(np.log(4000), 0.9, count), 32_768)
    return (np.repeat(generator.integers(100, 601, count // 16), 16) + tokens).astype(np.int64)


def trajectories(seed: int) -> Any:
    """Return 2,048 trajectories of agents, up to 65,536 tokens."""
    tokens = np.random.default_rng(seed).lognormal(np.log(12_000), 0.9, 2048)
    return np.minimum(tokens, 65_536).astype(np.int64)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("draw", "num_ranks", "max_tokens", "per_micro_batch", "per_step"),
    [(answers, 16, 33_792, 1.018, 1.004), (trajectories, 64, 65_536, 1.065, 1.010)],
)
def test_ranks_have_equal_work_for_every_balance(
    draw: Any, num_ranks: int, max_tokens: int, per_micro_batch: float, per_step: float, seed: int
) -> None:
    """Two steps on which other planners were measured."""
    lengths = draw(seed)
    for balance in BALANCES:
        rules: Any = {"num_ranks": num_ranks, "max_tokens_per_rank": max_tokens}
        plan = plan_step(lengths, **rules, linear_cost_tokens=24_576, balance=balance)
        assert plan.num_micro_batches == -(-int(lengths.sum()) // (num_ranks * max_tokens))
        assert not broken_laws(plan, max_tokens, 1, 2048)
        path = plan.critical_path(24_576)
        assert path.per_step < per_step
        if balance == "micro_batches":
            assert path.per_micro_batch < per_micro_batch


def pictures(seed: int, size: int = 600) -> tuple[Any, Any]:
    """Return lengths and costs (language model, encoder) of samples, 60 % with images.

    One to four images each, of up to 4,096 patches, four of which make a token.
    """
    generator = np.random.default_rng(seed)
    text = np.minimum(generator.lognormal(np.log(1000), 0.9, size), 8192)
    count = np.where(generator.random(size) < 0.6, generator.integers(1, 5, size), 0)
    patches = np.minimum(generator.lognormal(np.log(1200), 0.6, (size, 4)), 4096)
    patches *= np.arange(4) < count[:, None]
    lengths = (text + patches.sum(axis=1) / 4).astype(np.int64) + 1
    vision = (patches * (6912 + patches)).sum(axis=1)
    return lengths, np.stack([lengths * (24_576.0 + lengths), vision], axis=1)


def paths(plan: StepPlan, costs: Any) -> list[float]:
    """Return the path of every kind of cost (busiest rank per micro batch) over the ideal."""
    found = []
    for kind in costs.T:
        shares = np.zeros((plan.num_micro_batches, plan.num_ranks))
        np.add.at(shares, (plan.micro_batch, plan.first_rank), kind)
        found.append(shares.max(axis=1).sum() * plan.num_ranks / kind.sum())
    return found


@pytest.mark.parametrize("seed", range(1, 7))
def test_two_kinds_of_cost_are_balanced_together(seed: int) -> None:
    lengths, costs = pictures(seed)
    rules: dict[str, Any] = {"num_ranks": 16, "max_tokens_per_rank": 16_384}
    assert max(paths(plan_step(lengths, **rules, costs=costs), costs)) < 1.03
    assert paths(plan_step(lengths, **rules, costs=costs[:, 0]), costs)[1] > 1.2


def test_a_stream_of_images_is_balanced_on_64_ranks_under_a_limit() -> None:
    """The encoder's path; no rank exceeds 1.1 times its mean cost in a full micro batch."""
    lengths, costs = pictures(1, 6000)
    limit = 1.1 * costs[:, 1].sum() / lengths.sum() * 16_384
    rules: dict[str, Any] = {"num_ranks": 64, "max_tokens_per_rank": 16_384, "window": 2048}

    def encoder(planner: StepPlanner, cost: Any) -> Any:
        """Return the encoder's cost by micro batch and rank."""
        planned = planner.add(np.arange(len(lengths)), lengths, cost)
        return np.array([[costs[d, 1].sum() for d in m.documents] for m in planned])

    shares = encoder(StepPlanner(**rules, max_costs_per_rank=[np.inf, limit]), costs)
    assert len(shares) >= 8 and shares.max() <= limit
    assert shares.max(axis=1).sum() * 64 / shares.sum() < 1.05
    by_tokens = encoder(StepPlanner(**rules), None)
    assert by_tokens.max() > limit
    assert by_tokens.max(axis=1).sum() * 64 / by_tokens.sum() > 1.2


def test_cost_limits_need_few_more_micro_batches() -> None:
    """At most 12 images on a rank, a limit that a plan by tokens exceeds."""
    generator = np.random.default_rng(3)
    lengths = generator.integers(200, 4000, 600)
    images = np.where(generator.random(600) < 0.6, generator.integers(1, 9, 600), 0)
    rules: dict[str, Any] = {"num_ranks": 16, "max_tokens_per_rank": 16_384}
    rules["costs"] = np.stack([lengths, images], axis=1)
    capped = {"costs": rules["costs"], "max_costs": [np.inf, 12]}
    assert broken_laws(plan_step(lengths, **rules), 16_384, 1, 600, **capped)
    plan = plan_step(lengths, **rules, max_costs_per_rank=capped["max_costs"])
    assert not broken_laws(plan, 16_384, 1, 600, **capped)
    assert plan.num_micro_batches <= 1.1 * images.sum() / (16 * 12) + 1


def test_ranks_share_whole_groups() -> None:
    """A prompt's answers; the longest does not fit on one rank."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(100, 3000, 200)
    groups = np.repeat(np.arange(50), 4)
    lengths[::16] = 9000
    plan = plan_step(
        lengths, num_ranks=8, max_tokens_per_rank=8192, max_context_parallel_size=8, groups=groups
    )
    assert not broken_laws(plan, 8192, 8, 200, groups=groups)
    assert (plan.degree[groups % 4 == 0] > 1).all()
    assert plan.num_micro_batches <= -(-int(lengths.sum()) // (8 * 8192)) + 1


def test_plan_lists_and_permutations_of_the_module_example() -> None:
    """Lists of the module's example, and results in the caller's order."""
    lengths = [7000, 300, 5200, 4100, 900, 2500, 6100, 1900]
    plan = plan_step(lengths, num_ranks=2, max_tokens_per_rank=8192)
    lists = plan.index_lists()
    for rank, of_rank in enumerate(lists):
        assert [of.tolist() for of in of_rank] == [of.tolist() for of in plan.of_rank(rank)]
    flat = [i for rank in lists for of in rank for i in of.tolist()]
    assert plan.permutation.tolist() == flat
    results = np.array(lengths)[plan.permutation]
    assert results[plan.inverse_permutation].tolist() == lengths
    # Shared documents are listed once.
    plan = plan_step([9, 3, 4, 1], num_ranks=4, max_tokens_per_rank=5, max_context_parallel_size=2)
    assert sorted(plan.permutation.tolist()) == [0, 1, 2, 3]
    assert plan.permutation[plan.inverse_permutation].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_loss_weights_equal_the_three_means(num_ranks: int) -> None:
    """Compare with the definitions of the three means."""
    generator = np.random.default_rng(num_ranks)
    labels = generator.integers(0, 20, 64)
    groups = np.repeat(np.arange(16), 4)
    labels[groups == 5] = 0
    losses = [generator.random(n) for n in labels]
    plan = plan_step(labels + 1, num_ranks=num_ranks, max_tokens_per_rank=64)
    of_groups = [np.concatenate(losses[4 * g : 4 * g + 4]) for g in range(16) if g != 5]
    wanted = {
        "token_mean": np.concatenate(losses).mean(),
        "sequence_mean": np.mean([of.mean() for of in losses if len(of)]),
        "group_mean": np.mean([of.mean() for of in of_groups]),
    }
    for loss, value in wanted.items():
        weights = plan.loss_weights(labels, loss, groups if loss == "group_mean" else None)
        held = [i for rank in plan.index_lists() for of in rank for i in of]
        found = sum((weights[i] * losses[i]).sum() for i in held)
        assert found == pytest.approx(value, rel=1e-12)
    assert not plan.loss_weights(np.zeros(64, np.int64)).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1],), r"num_labels has shape \(1,\)"),
        (([1, -1],), "num_labels of document 1 is -1"),
        (([1, 1], "mean"), "loss is 'mean'; choose token_mean, sequence_mean or group_mean"),
        (([1, 1], "group_mean"), "loss is 'group_mean' and groups are missing"),
        (([1, 1], "token_mean", [0, 0]), "loss is 'token_mean' and groups are given"),
        (([1, 1], "group_mean", [0.5, 0]), "groups has shape"),
    ],
)
def test_invalid_losses_are_refused(arguments: Any, message: str) -> None:
    plan = plan_step([3, 4], num_ranks=2, max_tokens_per_rank=8)
    with pytest.raises(ValueError, match=message):
        plan.loss_weights(*arguments)


def test_fewest_ranks_share_a_long_document() -> None:
    lengths = [100] * 16 + [801]
    plan = plan_step(lengths, num_ranks=8, max_tokens_per_rank=400, max_context_parallel_size=8)
    assert plan.num_micro_batches == 1 and plan.degree[16] >= 4
    # With only attention, all ranks share a document that dominates it. If linear layers cost a
    # thousand times as much, sharing gains nothing.
    rules = {"num_ranks": 16, "max_tokens_per_rank": 100, "max_context_parallel_size": 16}
    lengths = [150] + [10] * 100
    assert plan_step(lengths, **rules).degree[0] == 16
    plan = plan_step(lengths, **rules, linear_cost_tokens=150_000)
    assert plan.degree.tolist() == [2] + [1] * 100


def test_more_micro_batches_if_documents_do_not_fit_together() -> None:
    """Five documents of 5,000 tokens do not fit into one micro batch of four ranks of 8,192."""
    plan = plan_step([5000] * 5, num_ranks=4, max_tokens_per_rank=8192)
    assert plan.num_micro_batches == 2
    # They fit if they are shared.
    plan = plan_step([5000] * 5, num_ranks=4, max_tokens_per_rank=8192, max_context_parallel_size=4)
    assert plan.num_micro_batches == 1


def test_order_decides_only_between_equal_lengths() -> None:
    """Another order of the documents gives the same groups of lengths."""
    lengths = web_lengths(16 * 2 * 4096, 1, 4096)
    rules: dict[str, Any] = {"num_ranks": 16, "max_tokens_per_rank": 4096}

    def contents(plan: StepPlan) -> list[list[int]]:
        documents = [of for rank in plan.index_lists() for of in rank]
        return [sorted(plan.lengths[of].tolist()) for of in documents]

    shuffled = np.random.default_rng(0).permutation(lengths)
    assert shuffled.tolist() != lengths.tolist()
    assert contents(plan_step(lengths, **rules)) == contents(plan_step(shuffled, **rules))


def test_threads_compute_the_same_plan() -> None:
    lengths = [37 * i % 1999 + 1 for i in range(500)]

    def planned(_: int) -> list[list[int]]:
        plan = plan_step(
            lengths, num_ranks=16, max_tokens_per_rank=1024, max_context_parallel_size=8
        )
        return [of.tolist() for of in (plan.first_rank, plan.degree, plan.micro_batch)]

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(planned, range(8))
    assert all(other == first for other in others)


def test_step_without_documents_has_no_micro_batches() -> None:
    plan = plan_step([], num_ranks=4, max_tokens_per_rank=10)
    assert plan.num_micro_batches == 0 and plan.of_rank(3) == []
    assert plan.critical_path(1.0).per_step == 1.0


@pytest.mark.parametrize(
    ("lengths", "rules", "message"),
    [
        ([3, 0], {}, "document 1 has 0 tokens; leave it out"),
        (
            [3, 21],
            {},
            r"1 has 21 tokens; 2 ranks \(max_context_parallel_size\) of 10 tokens .* hold 20",
        ),
        ([1 << 60], {"max_tokens_per_rank": 1 << 40}, "document 0 has"),
        ([1 << 27] * 5, {"max_tokens_per_rank": 1 << 30}, "document 4: squared lengths sum"),
        (
            [3],
            {"max_context_parallel_size": 3},
            "max_context_parallel_size is 3; it must be a power of two",
        ),
        (
            [3],
            {"max_context_parallel_size": 8},
            r"max_context_parallel_size is 8; .* at most num_ranks \(4\)",
        ),
        ([3], {"num_ranks": 0}, "num_ranks is 0"),
        ([3], {"max_tokens_per_rank": True}, "max_tokens_per_rank is True"),
        ([3], {"max_documents_per_rank": 0}, "max_documents_per_rank is 0"),
        ([3], {"linear_cost_tokens": -1}, "linear_cost_tokens is -1"),
        ([3], {"linear_cost_tokens": 1 << 29}, "linear_cost_tokens is 536870912"),
        ([3.5], {}, "it must be a list of integers"),
        ([3], {"linear_cost_tokens": float("inf")}, "linear_cost_tokens is inf"),
        ([3], {"linear_cost_tokens": 10**400}, "linear_cost_tokens is 1000"),
        (np.array([2**63], np.uint64), {}, "lengths has the number 9223372036854775808"),
        ([3], {"groups": np.array([2**63], np.uint64)}, "groups has the number 92233720368547758"),
        (
            [3],
            {"num_ranks": 64, "micro_batch_multiple": 1 << 20},
            r"64 ranks \(num_ranks\) of 1048576 micro batches give 67108864 places .* 16777216",
        ),
        ([3, 4], {"costs": [1.0]}, r"costs has shape \(1,\); give one row for each"),
        ([3, 4], {"costs": []}, r"costs has shape \(0,\); give one row for each"),
        ([3, 4], {"costs": np.zeros((2, 0))}, r"costs has shape \(2, 0\); give one row for each"),
        ([3, 4], {"groups": []}, r"groups has shape \(0,\); give one row for each"),
        ([3, 4], {"costs": [1.0, -2.0]}, "document 1 has the cost -2"),
        ([3], {"costs": ["1"]}, "costs has dtype <U1; it must be real numbers"),
        ([3], {"costs": [1j]}, "costs has dtype complex128"),
        ([3], {"costs": np.array([3], "m8[s]")}, r"costs has dtype timedelta64\[s\]"),
        ([3], {"costs": [1], "max_costs_per_rank": "9"}, "max_costs_per_rank has dtype <U1"),
        (
            [11, 12],
            {"groups": [1, 1]},
            r"group 1 has 23 tokens; 2 ranks .max_context_parallel_size. of 10 .* hold 20.* split",
        ),
        (
            [3, 4],
            {"groups": [1, 1], "max_documents_per_rank": 1},
            r"group 1 has 2 documents; a rank holds 1 \(max_documents_per_rank\)",
        ),
        (
            [3, 4],
            {"costs": [4, 5], "groups": [1, 1], "max_costs_per_rank": 4},
            r"group 1 costs more \(kind 0\) than 2 ranks",
        ),
        ([3], {"costs": [9], "max_costs_per_rank": 4}, "document 0 has the cost 9; 2 ranks"),
        ([3], {"costs": [9], "max_costs_per_rank": [9, 9]}, "max_costs_per_rank has 2 numbers"),
        ([3], {"costs": [9], "max_costs_per_rank": -1}, "max_costs_per_rank of kind 0 is -1"),
        ([3], {"costs": [[1.0] * 65]}, "costs has 65 kinds; at most 64"),
        ([3, 4], {"groups": [1.5, 1]}, r"groups has shape \(2,\) and dtype float64; it must be"),
        ([3, 4], {"balance": "tokens"}, "balance is 'tokens'; it must be 'micro_batches' or"),
        ([3, 4], {"micro_batch_multiple": 0}, "micro_batch_multiple is 0"),
        ([[3]], {}, r"lengths has shape \(1, 1\)"),
    ],
)
def test_errors_name_value_and_limit(lengths: Any, rules: dict[str, Any], message: str) -> None:
    sound = {"num_ranks": 4, "max_tokens_per_rank": 10, "max_context_parallel_size": 2}
    with pytest.raises(ValueError, match=message):
        plan_step(lengths, **(sound | rules))


def test_plan_is_frozen_and_refuses_ranks_out_of_range() -> None:
    plan = megapack.plan_step([5, 6], num_ranks=2, max_tokens_per_rank=8)
    with pytest.raises(FrozenInstanceError):
        plan.num_ranks = 3
    with pytest.raises(ValueError, match="rank is 2; the plan is for 2 ranks"):
        plan.of_rank(2)
    for rank in (-1, 2):  # indexing would silently return chunks of another rank
        with pytest.raises(ValueError, match=f"cp_rank is {rank}; it must be from 0 to 1"):
            context_parallel_indices(np.array([0, 8]), 2, rank)


def test_linear_cost_tokens_is_the_length_of_equal_costs() -> None:
    model = MODELS["7b"]
    squares = model.flops_per_square * model.linear_cost_tokens**2
    assert squares == pytest.approx(model.flops_per_token * model.linear_cost_tokens)


# ---- Laws of random plans with every option; plans of few documents against the optimum
#
# MEGAPACK_PLANS=20000 runs that many plans, and 1,000 steps against the optimum.


PLANS = int(os.environ.get("MEGAPACK_PLANS", "1000"))
PARTS = 8


def random_step(seed: int) -> tuple[list[int], dict[str, Any], list[int] | None]:
    """Draw lengths, options and groups; small numbers, so that limits are often met exactly."""
    generator = np.random.default_rng(seed)

    def below(n: int) -> int:
        return int(generator.integers(n))

    num_ranks, max_tokens = 1 + below(12), 1 + below(60)
    degrees = [d for d in (1, 1, 2, 4, 8) if d <= num_ranks]
    max_context_parallel_size = degrees[below(len(degrees))]
    longest = 1 + below(max_tokens * (max_context_parallel_size if below(2) else 1))
    lengths = generator.integers(1, longest + 1, below(50)).tolist()
    options: dict[str, Any] = {
        "num_ranks": num_ranks,
        "max_tokens_per_rank": max_tokens,
        "max_context_parallel_size": max_context_parallel_size,
        "max_documents_per_rank": 1 + below(8) if below(2) else None,
        "linear_cost_tokens": (0, 10, 1 << 20)[below(3)],
        "balance": BALANCES[below(3)],
        "micro_batch_multiple": 1 + below(3) if below(4) == 0 else 1,
    }
    if below(2):
        kinds = 1 + below(3)
        costs = generator.integers(0, 9, (len(lengths), kinds)) * generator.choice([0, 1, 0.25])
        options["costs"] = costs
        if below(2):  # at least 8, the largest cost of a document
            options["max_costs_per_rank"] = (8 + generator.integers(0, 20, kinds)).tolist()
    groups = None
    if below(3) == 0:
        groups = generator.integers(0, 12, len(lengths)).tolist()
        if max_context_parallel_size > 1:  # limit groups so that ranks can hold each one whole
            options.pop("max_costs_per_rank", None)
            room = dict.fromkeys(range(12), max_context_parallel_size * max_tokens)
            places = dict.fromkeys(range(12), options["max_documents_per_rank"] or 99)
            for i, group in enumerate(groups):
                if room[group] < lengths[i] or places[group] == 0:
                    groups[i] = 100 + i
                else:
                    room[group] -= lengths[i]
                    places[group] -= 1
    return lengths, options, groups


def test_rank_micro_batches_equal_definition() -> None:
    for seed in range(PLANS // 20):
        lengths, options, groups = random_step(seed)
        plan = plan_step(lengths, **options, groups=groups)
        for linear_cost_tokens in (0.0, 7.5, 1e6):
            wanted = np.array(costs(plan, linear_cost_tokens)).reshape(-1, plan.num_ranks)
            assert np.allclose(plan.cost(linear_cost_tokens), wanted, rtol=1e-9, atol=1e-3), seed
            path, ideal = plan.critical_path(linear_cost_tokens), wanted.sum() / plan.num_ranks
            if lengths:
                assert path.per_micro_batch == pytest.approx(wanted.max(axis=1).sum() / ideal)
                assert path.per_step == pytest.approx(wanted.sum(axis=0).max() / ideal)
        for rank in range(plan.num_ranks):
            held = (plan.first_rank <= rank) & (rank < plan.first_rank + plan.degree)
            own = [
                np.flatnonzero(held & (plan.micro_batch == m)).tolist()
                for m in range(plan.num_micro_batches)
            ]
            assert [documents.tolist() for documents in plan.of_rank(rank)] == own, seed


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
            options["max_context_parallel_size"],
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
    """Draw 8 to 10 lengths and a limit: 2 or 3 micro batches of two ranks, 77 to 97 % full."""
    generator = np.random.default_rng(seed)
    count, num_micro_batches = int(generator.integers(8, 11)), int(generator.integers(2, 4))
    if seed % 2:
        lengths = 256 * generator.integers(4, 129, count)
    else:
        lengths = np.minimum(generator.lognormal(9, 0.9, count), 32_768).astype(np.int64) + 1
    room = int(lengths.sum() * generator.uniform(1.03, 1.3) / (2 * num_micro_batches))
    return lengths.tolist(), max(room, int(lengths.max()))


def test_plans_of_few_documents_are_nearly_optimal() -> None:
    ratios: dict[str, list[float]] = {balance: [] for balance in BALANCES}
    for seed in range(PLANS // 20):
        lengths, room = few_documents(seed)
        cost = [n * (24_576 + n) for n in lengths]
        for num_micro_batches in range(-(-sum(lengths) // (2 * room)), 9):
            least = least_objectives(lengths, cost, num_micro_batches, room)
            if least["step"] < np.inf:
                break
        for balance in BALANCES:
            rules: Any = {
                "max_tokens_per_rank": room,
                "linear_cost_tokens": 24_576,
                "balance": balance,
            }
            plan = plan_step(lengths, num_ranks=2, **rules)
            assert plan.num_micro_batches == num_micro_batches, (seed, balance)
            of = plan.cost(24_576)
            found = (of.max(axis=1).sum(), of.sum(axis=0).max(), of.max())
            ratios[balance].append(float(found[BALANCES.index(balance)]) / least[balance])
    for balance, each in ratios.items():
        assert min(each) > 1 - 1e-9, f"{balance}: better than the optimum"
        assert np.mean(each) <= 1.005, balance
        assert max(each) <= 1.03, balance


def test_optimum_computed_by_hand() -> None:
    """3 and 2 + 1 in one micro batch, 4 and 4 in the other: path 3 + 4; each rank has 3 + 4."""
    least = least_objectives([4, 4, 3, 2, 1], [4, 4, 3, 2, 1], 2, 4)
    assert least == {"micro_batches": 7.0, "step": 7.0, "pipeline": 4.0}
    assert least_objectives([4, 4, 4], [4, 4, 4], 2, 9)["step"] == np.inf  # a place is empty
