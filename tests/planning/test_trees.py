"""plan_trees: trees by definition, laws of random plans, small plans against the optimum."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.trees import (
    fields,
    least_objective,
    occurrences,
    path,
    position_ids,
    predecessors,
    token_index,
    tree_of,
)

from megapack.planning import Tree, TreePlan, plan_trees

BALANCES = ("micro_batches", "step", "pipeline")

Sequences = list[list[int]]


def grow(draw: Any, count: int, symbols: int) -> Sequences:
    """Draw sequences that often continue, repeat or cut an earlier one."""
    sequences: Sequences = []
    for _ in range(count):
        old = draw(st.sampled_from(sequences)) if sequences and draw(st.booleans()) else []
        kept = old[: draw(st.integers(0, len(old)))]
        tokens = st.integers(0, symbols)
        sequences.append(kept + draw(st.lists(tokens, min_size=not kept, max_size=6)))
    return sequences


@st.composite
def steps(draw: st.DrawFn) -> tuple[Sequences, dict[str, Any]]:
    """Draw sequences and options; small numbers, so that limits are often met exactly."""
    sequences = grow(draw, draw(st.integers(0, 12)), draw(st.sampled_from([1, 3, 1000])))
    multiple = draw(st.sampled_from([1, 1, 4]))
    longest = -(-max(map(len, sequences), default=1) // multiple) * multiple
    options = {
        "num_ranks": draw(st.integers(1, 4)),
        "max_tokens_per_rank": longest + draw(st.integers(0, 30)),
        "linear_cost_tokens": draw(st.sampled_from([0, 10, 1 << 20])),
        "balance": draw(st.sampled_from(BALANCES)),
        "micro_batch_multiple": draw(st.sampled_from([1, 1, 2])),
        "max_depth": draw(st.sampled_from([None, None, 1, 2, 3])),
        "token_multiple": multiple,
    }
    if draw(st.booleans()):
        options["groups"] = [draw(st.integers(0, 3)) for _ in sequences]
    return sequences, options


def lists(tree: Tree) -> dict[str, list[int]]:
    names = tree_of({0: [1]})._fields
    return {name: getattr(tree, name).tolist() for name in names}


def flat(parts: list[list[int]]) -> list[int]:
    return [item for part in parts for item in part]


def contents(plan: TreePlan, sequences: Sequences) -> list[list[Sequences]]:
    """Return the sequences of each tree, in order, by rank and micro batch."""
    return [[[sequences[i] for i in t.sequences.tolist()] for t in rank] for rank in plan.trees]


# ---- Trees


@given(step=steps())
def test_trees_are_those_of_the_definition(step: tuple[Sequences, dict[str, Any]]) -> None:
    sequences, options = step
    plan = plan_trees(sequences, **options)
    offsets = np.cumsum([0, *map(len, sequences)])
    for tree in (tree for rank in plan.trees for tree in rank):
        own = tree_of({i: sequences[i] for i in tree.sequences.tolist()})
        if options["max_depth"] is None:
            assert lists(tree) == own._asdict()
        else:  # some nodes are repeated: the layout is that of the tree's own nodes
            own = own._replace(**lists(tree))
        nodes = range(len(own.node_begins))
        for name, dtype in fields(own).items():
            assert getattr(tree, name).dtype == dtype.dtype, name
        assert tree.num_tokens == sum(own.node_lengths)
        assert tree.cu_seqlens_q.tolist() == np.cumsum([0, *own.node_lengths]).tolist()
        paths = [path(own, node) for node in nodes]
        assert tree.cu_seqlens_k.tolist() == np.cumsum([0, *map(len, paths)]).tolist()
        assert tree.kv_index.tolist() == flat(paths)
        assert tree.position_ids.tolist() == position_ids(own)
        assert tree.predecessors.tolist() == predecessors(own)
        rows = token_index(own)
        assert tree.token_index.tolist() == flat(rows)
        assert tree.token_offsets.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
        places = np.split(tree.occurrences, tree.occurrence_offsets[1:-1])
        assert [p.tolist() for p in places if len(p)] == occurrences(own)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "kv_index", "predecessors", "token_index"):
            assert getattr(tree, name).dtype == np.int32, name
        row = tree.gather(sequences)
        assert row.tolist() == tree.gather(flat(sequences), offsets).tolist()
        for number, rows_of in zip(own.sequences, rows, strict=True):
            assert row[rows_of].tolist() == sequences[number]


# ---- Plans


@given(step=steps())
def test_random_plans_keep_the_laws(step: tuple[Sequences, dict[str, Any]]) -> None:
    sequences, options = step
    plan = plan_trees(sequences, **options)
    ranks, multiple = options["num_ranks"], options["token_multiple"]
    assert plan.num_ranks == len(plan.trees) == ranks
    assert plan.num_micro_batches % options["micro_batch_multiple"] == 0
    assert all(len(rank) == plan.num_micro_batches for rank in plan.trees)
    held = [i for rank in plan.trees for tree in rank for i in tree.sequences.tolist()]
    assert sorted(held) == list(range(len(sequences))), "each sequence once"
    trie = sum(tree_of(dict(enumerate(sequences))).node_lengths)
    assert plan.trie_tokens == trie
    exact = np.array([[t.num_tokens for t in rank] for rank in plan.trees], int).T
    assert plan.repeated_tokens == exact.sum() - trie >= 0
    assert plan.num_tokens.tolist() == (-(-exact // multiple) * multiple).tolist()
    assert plan.num_tokens.max(initial=0) <= options["max_tokens_per_rank"]
    assert plan.num_micro_batches * ranks * options["max_tokens_per_rank"] >= trie
    cost = [[sum(2 * p + 11 for p in t.position_ids.tolist()) for t in r] for r in plan.trees]
    assert plan.cost(10).tolist() == np.array(cost, float).reshape(exact.T.shape).T.tolist()
    if sequences:
        found, ideal = plan.critical_path(10), np.sum(cost) / ranks
        assert found.per_micro_batch == pytest.approx(np.max(cost, axis=0).sum() / ideal)
        assert found.per_step == pytest.approx(np.sum(cost, axis=1).max() / ideal)
    if options["max_depth"] is not None:
        for tree in (tree for rank in plan.trees for tree in rank):
            depth: list[int] = []
            for parent in tree.node_parents.tolist():
                depth.append(1 if parent < 0 else depth[parent] + 1)
            assert max(depth, default=0) <= options["max_depth"]


@given(step=steps())
def test_groups_stay_together(step: tuple[Sequences, dict[str, Any]]) -> None:
    sequences, options = step
    options["max_depth"] = None
    groups = options.setdefault("groups", [i % 3 for i in range(len(sequences))])
    plan = plan_trees(sequences, **options)
    where = {
        i: (rank, m)
        for rank, trees in enumerate(plan.trees)
        for m, tree in enumerate(trees)
        for i in tree.sequences.tolist()
    }
    for group in set(groups):
        members = {i: sequences[i] for i in where if groups[i] == group}
        padded = -(-sum(tree_of(members).node_lengths) // options["token_multiple"])
        fits = padded * options["token_multiple"] <= options["max_tokens_per_rank"]
        assert len({where[i][0] for i in members}) == 1, "one rank"
        assert not fits or len({where[i] for i in members}) == 1, "one micro batch"


@given(step=steps(), order=st.randoms())
def test_plans_do_not_depend_on_the_order_of_arrival(
    step: tuple[Sequences, dict[str, Any]], order: random.Random
) -> None:
    sequences, options = step
    options.pop("groups", None)
    shuffled = order.sample(sequences, len(sequences))
    plan, again = plan_trees(sequences, **options), plan_trees(shuffled, **options)
    assert contents(plan, sequences) == contents(again, shuffled)


@given(step=steps())
def test_keys_of_parts_give_the_plan_of_their_tokens(
    step: tuple[Sequences, dict[str, Any]],
) -> None:
    """Key k has the tokens 10 k, 10 k + 1, ...: the order of keys is that of tokens."""
    keys, options = step
    lengths = [[1 + key % 3 for key in sequence] for sequence in keys]
    tokens = [[10 * k + i for k in sequence for i in range(1 + k % 3)] for sequence in keys]
    longest = max(map(len, tokens), default=1) + options["token_multiple"]
    options["max_tokens_per_rank"] = max(options["max_tokens_per_rank"], longest)
    plan, wanted = plan_trees(keys, lengths=lengths, **options), plan_trees(tokens, **options)
    for rank, other in zip(plan.trees, wanted.trees, strict=True):
        assert [lists(t) for t in rank] == [lists(t) for t in other]


def small_step(seed: int) -> tuple[Sequences, int, int]:
    """Draw 5 to 7 sequences with one to three roots, ranks and a limit that is 70 to 100 % full."""
    r = random.Random(seed)
    sequences = [
        [100 * i + r.randrange(3) for _ in range(r.randint(1, 12))]
        + [r.randrange(1000) for _ in range(r.randint(1, 20))]
        for i in range(r.randint(1, 3))
    ]
    while len(sequences) < 5 + seed % 3:
        old = r.choice(sequences)
        added = [r.randrange(1000) for _ in range(r.randint(0, 20))]
        sequences.append(old[: r.randint(1, len(old))] + added)
    ranks = 1 + seed % 2
    tokens = sum(tree_of(dict(enumerate(sequences))).node_lengths)
    room = int(tokens * r.uniform(1.0, 1.4) / (ranks * r.randint(1, 3))) + 1
    return sequences, ranks, max(room, *map(len, sequences))


def test_plans_of_few_sequences_are_nearly_optimal() -> None:
    for balance in ("micro_batches", "pipeline"):
        ratios = []
        for seed in range(40):
            sequences, ranks, room = small_step(seed)
            rules: Any = {"linear_cost_tokens": 10, "balance": balance}
            plan = plan_trees(sequences, num_ranks=ranks, max_tokens_per_rank=room, **rules)
            least, num_micro_batches = least_objective(sequences, ranks, room, 10, balance)
            assert plan.num_micro_batches == num_micro_batches, seed
            cost = plan.cost(10)
            longest = cost.max(axis=1).sum() if balance == "micro_batches" else cost.max()
            trie = plan_trees(sequences, num_ranks=1, max_tokens_per_rank=1 << 20)
            objective = plan.num_tokens.sum() / plan.trie_tokens
            ratios.append((objective + ranks * longest / trie.cost(10).sum()) / least)
        assert min(ratios) > 1 - 1e-9, "better than the optimum"
        assert np.mean(ratios) <= 1.005 and max(ratios) <= 1.03, balance


# ---- Workloads: rollouts of one prompt, and agents whose turns branch


def rollouts(seed: int, num_groups: int, *, agent: bool) -> list[Any]:
    """Draw 16 sequences per group: a prompt, then one turn (agent: six, which often branch from an
    earlier sequence's turns)."""
    r = np.random.default_rng(seed)
    prompt, turn, num_turns = ((1000, 3000), 6.2, 6) if agent else ((500, 2000), 7.5, 1)
    sequences: list[Any] = []

    def words(count: int) -> Any:
        return r.integers(0, 32_000, count, np.int32)

    for _ in range(num_groups):
        base, seen = words(r.integers(*prompt)), []
        for _ in range(16):
            turns: list[Any] = []
            if agent and seen and r.random() < 0.6:
                turns = seen[r.integers(len(seen))][: r.integers(1, num_turns + 1)]
            while len(turns) < num_turns:
                turns = [*turns, words(int(np.clip(np.exp(r.normal(turn, 0.8)), 20, 4000)))]
            seen.append(turns)
            sequences.append(np.concatenate([base, *turns]))
    return [sequences[i] for i in r.permutation(len(sequences))]


def least_tokens(sequences: list[Any], room: int) -> int:
    """Return the fewest tokens of trees of `room` tokens: a group of s tokens with a prompt of p
    needs (s - p) / (room - p) trees, each with the prompt."""
    groups: dict[tuple[int, ...], list[Any]] = {}
    for sequence in sequences:
        groups.setdefault(tuple(sequence[:100].tolist()), []).append(sequence)
    least = 0
    for members in groups.values():
        tree = plan_trees(members, num_ranks=1, max_tokens_per_rank=1 << 20).trees[0][0]
        prompt = int(tree.node_lengths[0])
        parts = math.ceil((tree.num_tokens - prompt) / (room - prompt))
        least += tree.num_tokens + (parts - 1) * prompt
    return least


@pytest.mark.parametrize("agent", [False, True])
def test_repeated_tokens_are_near_their_least_number(agent: bool) -> None:
    for seed in range(3):
        sequences, room = rollouts(seed, 16, agent=agent), 32_768
        plan = plan_trees(sequences, num_ranks=1, max_tokens_per_rank=room)
        least = least_tokens(sequences, room)
        assert least <= plan.num_tokens.sum() <= 1.015 * least
        assert plan.num_micro_batches <= 1.1 * math.ceil(plan.trie_tokens / room)


@pytest.mark.parametrize("seed", range(2))
def test_best_of_n_needs_few_trees(seed: int) -> None:
    """A tree has room for one prompt of 400 tokens and its 16 answers, or for parts of four."""
    r, room = np.random.default_rng(seed), 2048
    sequences = []
    for _ in range(40):
        prompt = r.integers(0, 32_000, 400)
        sizes = np.clip(np.exp(r.normal(4.5, 0.3, 16)), 8, None).astype(int)
        sequences += [np.concatenate([prompt, r.integers(0, 32_000, size)]) for size in sizes]
    plan = plan_trees(sequences, num_ranks=1, max_tokens_per_rank=room)
    least = least_tokens(sequences, room)
    assert plan.num_tokens.sum() <= 1.01 * least
    assert plan.num_micro_batches <= 1.09 * math.ceil(least / room)


def test_a_chain_of_prefixes_needs_a_limit_of_depth() -> None:
    text = np.random.default_rng(0).integers(0, 100, 2048)
    chain: list[Any] = [text[: i + 1] for i in range(2048)]
    with pytest.raises(ValueError, match=r"2098176 on the paths of its 2048 nodes; .* lower max_d"):
        plan_trees(chain, num_ranks=1, max_tokens_per_rank=2048)
    plan = plan_trees(chain, num_ranks=1, max_tokens_per_rank=2048, max_depth=2)
    assert max(len(tree.kv_index) for tree in plan.of_rank(0)) <= 256 * 2048
    assert plan_trees(chain[:500], num_ranks=1, max_tokens_per_rank=2048).num_micro_batches == 1


def test_ranks_of_a_large_step_have_equal_work() -> None:
    plan = plan_trees(
        rollouts(0, 128, agent=False),
        num_ranks=16,
        max_tokens_per_rank=32_768,
        linear_cost_tokens=24_576,
    )
    assert plan.num_tokens.max() <= 32_768
    assert plan.num_micro_batches <= 1.1 * math.ceil(plan.trie_tokens / (16 * 32_768)) + 1
    assert plan.repeated_tokens <= 0.035 * plan.trie_tokens
    assert plan.critical_path(24_576).per_step <= 1.03


def test_ranks_of_many_short_sequences_have_equal_work() -> None:
    tokens = np.random.default_rng(0).integers(0, 32_000, 100_000, np.int32)
    rules = {"num_ranks": 16, "max_tokens_per_rank": 820, "linear_cost_tokens": 24_576}
    plan = plan_trees(tokens, offsets=np.arange(0, 100_001, 10), **rules)
    assert plan.num_micro_batches == math.ceil(plan.trie_tokens / (16 * 820))
    assert plan.critical_path(24_576).per_micro_batch <= 1.03


# ---- Refusals


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([[1], []], {}, "sequence 1 has 0 tokens; leave it out"),
        ([[1] * 11, [1]], {}, "sequence 0 has 11 tokens; a tree holds 10"),
        ([[1] * 9], {"token_multiple": 4}, "sequence 0 has 9 tokens; a tree holds 8"),
        ([[1.5]], {}, r"sequences\[0\] has shape \(1,\) and dtype float64"),
        ([1, 2], {"offsets": [0, 3]}, "offsets has 2 numbers for 2 items of sequences"),
        ([1, 2], {"offsets": [1, 0]}, "never decreases"),
        ([[1], [2]], {"groups": [1]}, r"groups has shape \(1,\); there are 2 sequences"),
        ([[1, 2]], {"lengths": [[1]]}, "lengths has 1 parts in 1 sequences"),
        ([[7]], {"lengths": [[0]]}, "lengths of part 0 is 0; leave out parts without tokens"),
        ([[7], [7]], {"lengths": [[2], [3]]}, "key 7 has the lengths 2 and 3 after the same keys"),
        ([[1]], {"num_ranks": 0}, "num_ranks is 0; it must be from 1"),
        ([[1]], {"max_depth": 0}, "max_depth is 0; it must be from 1"),
        ([[1]], {"token_multiple": 11}, "token_multiple is 11; it must be from 1 to 10"),
        ([[1]], {"linear_cost_tokens": -1}, "linear_cost_tokens is -1"),
        ([[1]], {"balance": "tokens"}, "balance is 'tokens'; it must be 'micro_batches' or"),
        ([[1]], {"num_ranks": 1 << 20, "micro_batch_multiple": 99}, "the limit is 16777216"),
    ],
)
def test_errors_name_value_and_limit(sequences: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_trees(sequences, **{"num_ranks": 1, "max_tokens_per_rank": 10, **options})


def test_rank_out_of_range_is_refused() -> None:
    plan = plan_trees([[1]], num_ranks=2, max_tokens_per_rank=2)
    with pytest.raises(ValueError, match="rank is 2; the plan is for 2 ranks"):
        plan.of_rank(2)
