"""``make bench-trees``: prefix trees of a step, compared with AReaL's and with lower bounds.

Workloads (three seeds, sequences in random order), each of groups of 16 that share a prompt:

* grpo: prompts of 500 to 2,000 tokens, one answer (log-normal, median 1,808, at most 4,000); trees
  of at most 32,768 tokens, as for agent.
* agent: prompts of 1,000 to 3,000 tokens and six turns (median 493); with probability .6 a sequence
  keeps the first turns of an earlier one.
* best of n: prompts of 400 tokens, one answer (log-normal, median 90); trees of at most 2,048.

The bound: a group whose trie has s tokens and a prompt of p needs ceil((s - p) / (cap - p)) trees,
and each repeats the prompt. No plan forwards fewer tokens.

Columns (means over seeds): forwarded tokens divided by those of one trie; the same divided by the
bound; trees, and how many the tokens of the bound fill; the step's length divided by the ideal if
ranks synchronize at every micro batch, and if only once; milliseconds of CPU time, of megapack the
least of 25.

AREAL names a checkout of AReaL, whose ``_greedy_build_tries`` is called without its trainer's
other modules; no code is copied. It plans for one rank, in the order of arrival: here sorted by
group (its best case) and in random order. Without the variable it is skipped.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import fmean
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from common import checkout_commit, in_child, peer_of, quick, show, write_results
from numpy.typing import NDArray

from megapack.planning import plan_trees

CAPS = {"grpo": 32_768, "agent": 32_768, "best of n": 2048}
LINEAR_COST_TOKENS = 24_576
Sequences = list[NDArray[np.int32]]
Row = dict[str, Any]


def workload(seed: int, num_groups: int, name: str) -> Sequences:
    """Return sequences group after group."""
    r = np.random.default_rng(seed)
    prompt, median, sigma, num_turns = {
        "grpo": ((500, 2001), 7.5, 0.8, 1),
        "agent": ((1000, 3001), 6.2, 0.8, 6),
        "best of n": ((400, 401), 4.5, 0.3, 1),
    }[name]
    sequences = []

    def words(count: int) -> NDArray[np.int32]:
        return r.integers(0, 32_000, count, np.int32)

    for _ in range(num_groups):
        base, seen = words(int(r.integers(*prompt))), []
        for _ in range(16):
            turns: list[NDArray[np.int32]] = []
            if name == "agent" and seen and r.random() < 0.6:
                turns = seen[r.integers(len(seen))][: r.integers(1, num_turns + 1)]
            while len(turns) < num_turns:
                turns = [*turns, words(int(np.clip(np.exp(r.normal(median, sigma)), 20, 4000)))]
            seen.append(turns)
            sequences.append(np.concatenate([base, *turns]))
    return sequences


def bound(sequences: Sequences, cap: int) -> int:
    """Return the fewest tokens that trees of `cap` tokens forward; groups are runs of 16."""
    total = 0
    for begin in range(0, len(sequences), 16):
        tree = plan_trees(
            sequences[begin : begin + 16], num_ranks=1, max_tokens_per_rank=1 << 22
        ).trees[0][0]
        prompt = int(tree.node_lengths[0])
        parts = math.ceil((tree.num_tokens - prompt) / (cap - prompt))
        total += tree.num_tokens + (max(parts, 1) - 1) * prompt
    return total


def areal() -> Callable[[Sequences, int], list[int]]:
    """Return AReaL's packing: tokens of each tree. Its imports are replaced by empty modules, but
    for torch."""

    class Empty(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return MagicMock(name=name)

    def passed(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda function: function

    tree = "models.tree_attn"
    unused = ("api.cli_args", f"{tree}.constants", f"{tree}.module_fsdp", f"{tree}.triton_kernel")
    for name in (*unused, "utils", "utils.data", "utils.perf_tracer"):
        sys.modules[f"areal.{name}"] = Empty(f"areal.{name}")
    sys.modules["areal.utils.perf_tracer"].trace_perf = passed  # type: ignore[attr-defined]
    for package in ("areal", "areal.models", "areal.models.tree_attn"):
        found = sys.modules[package] = ModuleType(package)
        found.__path__ = [f"{path}/{package.replace('.', '/')}" for path in sys.path]
    theirs = importlib.import_module("areal.models.tree_attn.tree")
    torch = importlib.import_module("torch")

    def plan(sequences: Sequences, cap: int) -> list[int]:
        longest = max(map(len, sequences))
        ids = torch.zeros(len(sequences), longest, dtype=torch.long)
        mask = torch.zeros(len(sequences), longest, dtype=torch.long)
        for i, sequence in enumerate(sequences):
            ids[i, : len(sequence)] = torch.from_numpy(sequence)
            mask[i, : len(sequence)] = 1
        return theirs._greedy_build_tries({"input_ids": ids, "attention_mask": mask}, cap)[1]

    return plan


def measure_areal(cases: list[Sequences], cap: int) -> list[tuple[list[int], float]] | None:
    plan = peer_of("AReaL", areal, "AREAL")
    if plan is None:
        return None
    found = []
    for sequences in cases:
        begin = time.process_time()
        tokens = plan(sequences, cap)
        found.append((tokens, 1000 * (time.process_time() - begin)))
    return found


def rows_of(name: str, *, num_groups: int, num_ranks: int) -> list[Row]:
    """Measure one workload on all seeds."""
    ours: list[Row] = []
    ordered: list[Sequences] = []
    shuffled: list[Sequences] = []
    cap, case = CAPS[name], f"{name}, {16 * num_groups:,} sequences, {num_ranks} ranks"
    for seed in range(1, 2 if quick() else 4):
        sequences = workload(seed, num_groups, name)
        ordered.append(sequences)
        order = np.random.default_rng(seed).permutation(len(sequences))
        shuffled.append([sequences[i] for i in order])
        flat = np.concatenate(shuffled[-1])
        offsets = np.cumsum([0, *map(len, shuffled[-1])])
        times = []
        for _ in range(25):
            begin = time.process_time()
            plan = plan_trees(
                flat, offsets=offsets, num_ranks=num_ranks, max_tokens_per_rank=cap,
                linear_cost_tokens=LINEAR_COST_TOKENS,
            )  # fmt: skip
            plan.of_rank(0)
            times.append(1000 * (time.process_time() - begin))
        assert plan.num_tokens.max() <= cap
        path, least = plan.critical_path(LINEAR_COST_TOKENS), bound(sequences, cap)
        ours.append({
            "trie": plan.trie_tokens, "bound": least,
            **counts(plan.num_tokens.ravel().tolist(), plan.trie_tokens, least),
            "needed": math.ceil(least / cap),
            "per_micro_batch": path.per_micro_batch, "per_step": path.per_step,
            "milliseconds": min(times),
        })  # fmt: skip
    rows = [{"case": case, "side": "megapack", **means(ours)}]
    for side, cases in (("AReaL, by group", ordered), ("AReaL, shuffled", shuffled)):
        found = in_child(partial(measure_areal, cases, cap)) if num_ranks == 1 else None
        for row, (tokens, milliseconds) in zip(ours, found or [], strict=False):
            row |= {
                **counts(tokens, row["trie"], row["bound"]),
                "milliseconds": milliseconds, "per_micro_batch": None, "per_step": None,
            }  # fmt: skip
        if found:
            rows.append({"case": case, "side": side, **means(ours)})
    return rows


def counts(trees: list[int], trie: int, least: int) -> Row:
    """Return the columns of the tokens of trees."""
    total = sum(trees)
    return {"over_one_trie": total / trie, "over_bound": total / least, "trees": len(trees)}


def means(rows: list[Row]) -> Row:
    return {
        key: None if rows[0][key] is None else fmean(float(row[key]) for row in rows)
        for key in rows[0]
        if key not in ("trie", "bound")
    }


def main() -> None:
    rows = []
    for name in CAPS:
        sizes = ((40, 1),) if name == "best of n" else ((16, 1), (128, 16))
        for num_groups, num_ranks in sizes:
            rows += rows_of(name, num_groups=num_groups, num_ranks=num_ranks)
    show("trees", rows)
    peers = [{"peer": "AReaL", "commit": checkout_commit("AREAL")}]
    write_results("trees", {"trees": rows, "peers": peers})


if __name__ == "__main__":
    main()
