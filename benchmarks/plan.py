"""``make bench-plan``: a step's documents dealt to ranks and micro batches, beside other planners.

Documents whole (SFT, RL), under a cap on tokens of a rank in a micro batch:

* reason: 2,048 documents: prompts of 100 to 600 tokens in groups of 16, answers lognormal (4,000,
  .9) to 32,768; cap 33,792. agent: 2,048, lognormal (12,000, .9) to 65,536, which is the cap.
* images: 600, 60 % with one to eight images: a vision encoder's cost beside the language model's.

Documents shared (pretraining): web pages up to 131,072 tokens, 65,536 per rank and step, cap 8,192.

Columns: micro batches of a rank, and extra ones over what the tokens need; pairs of rank and micro
batch over the cap, and without a document; length of the step over the ideal where ranks meet at
every micro batch, and once (a document of n tokens costs 24,576 n + n^2, shared 49,152 n + n^2), of
the vision encoder's cost and of attention alone; milliseconds. Means of the steps.

``plan_peers`` says which variable names whose checkout; README quotes the table of the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np
from common import in_child, quick, show, write_results
from lengths import LAWS
from numpy.typing import NDArray
from plan_peers import LINEAR_LENGTH, PEERS, Held, Peer, planner, version

from megapack.planning import DEALERS, Cluster, StepPlan, plan_step

WHOLE, SHARED = PEERS
LONGEST, TOKENS_PER_RANK = 131_072, 65_536
COUNTS = ("micro_batches", "extra", "over_the_cap", "empty")

Lengths = NDArray[np.int64]
Numbers = NDArray[np.float64]
Side = Callable[["Case", Lengths, "Numbers | None"], "StepPlan | Held"]


@dataclass(frozen=True)
class Case:
    name: str
    num_ranks: int
    max_tokens: int
    steps: list[tuple[Lengths, Numbers | None]]  # lengths, costs of the vision encoder
    family: str = WHOLE
    linear_length: int = LINEAR_LENGTH


def cases() -> list[Case]:
    """Three seeds of each; of the web pages consecutive steps."""

    def lognormal(generator: np.random.Generator, median: float, longest: int) -> Lengths:
        values = generator.lognormal(np.log(median), 0.9, 2048)
        return np.clip(np.rint(values), 1, longest).astype(np.int64)

    reason, agent, images = [], [], []
    for seed in range(1 if quick() else 3):
        generator = np.random.default_rng(seed)
        prompts = np.repeat(generator.integers(100, 601, 128), 16)
        reason.append((prompts + lognormal(generator, 4000, 32_768), None))
        agent.append((lognormal(generator, 12_000, 65_536), None))
        pictures = np.where(generator.random(600) < 0.6, generator.integers(1, 9, 600), 0)
        images.append((generator.integers(200, 4000, 600), pictures.astype(float)))
    found = [
        Case("reason, 16 ranks", 16, 33_792, reason),
        Case("agent, 64 ranks", 64, 65_536, agent),
        Case("images, 16 ranks", 16, 16_384, images),
    ]
    lengths = LAWS["fineweb_edu_like"](1_000_000, 1).astype(np.int64)
    for ranks, count in ((16, 20), (64, 20), (512, 3)):
        steps, begin = [], 0
        for _ in range(1 if quick() else count):
            ends = np.cumsum(lengths[begin : begin + ranks * TOKENS_PER_RANK // 100])
            size = int(np.searchsorted(ends, ranks * TOKENS_PER_RANK, side="right"))
            steps.append((lengths[begin : begin + size], None))
            begin += size
        found.append(Case(f"web, {ranks} ranks", ranks, 8192, steps, SHARED, 12 * 4096))
    return found


def ours(balance: Any, case: Case, lengths: Lengths, vision: Numbers | None) -> StepPlan:
    language = lengths * (case.linear_length + lengths)
    return plan_step(
        lengths,
        num_ranks=case.num_ranks,
        max_tokens_per_rank=case.max_tokens,
        max_degree=min(case.num_ranks, 64) if case.family == SHARED else 1,
        linear_length=case.linear_length,
        costs=None if vision is None else np.stack([language, vision], axis=1),
        balance=balance,
    )


def karmarkar_karp(case: Case, lengths: Lengths, _vision: Numbers | None) -> Held:
    """Of one size of context parallelism, which the longest document of the corpus needs."""
    degree = LONGEST // case.max_tokens if case.family == SHARED else 1
    cluster = Cluster(data_parallel=case.num_ranks // degree, context_parallel=degree)
    plan = DEALERS["Karmarkar-Karp"](lengths, cluster, case.max_tokens, case.linear_length)
    rising = np.argsort(lengths, kind="stable")  # a dealer tells lengths, not which document
    number = np.empty(len(lengths), np.int64)
    number[np.argsort(plan.lengths, kind="stable")] = rising
    return [[number[rank].tolist() for rank in m] for m in held_of(plan)]


def held_of(plan: StepPlan) -> Held:
    return [[rank.tolist() for rank in m] for m in zip(*plan.index_lists(), strict=True)]


def measure(held: Held, case: Case, lengths: Lengths, vision: Numbers | None) -> dict[str, float]:
    """What a dealing is worth, recomputed from the documents that each rank holds."""
    degree = np.bincount([i for m in held for rank in m for i in rank], minlength=len(lengths))
    assert degree.min() >= 1, "a document was lost"
    assert case.family == SHARED or degree.max() == 1, "a document was given twice"

    def of_ranks(values: Numbers) -> Numbers:
        return np.array([[(values[r] / degree[r]).sum() for r in m] for m in held])

    def path(work: Numbers) -> float:
        return float(work.max(axis=1).sum() * case.num_ranks / work.sum())

    tokens, attention = of_ranks(lengths.astype(float)), of_ranks(lengths.astype(float) ** 2)
    cost = attention + case.linear_length * tokens
    needed = -(-int(lengths.sum()) // (case.num_ranks * case.max_tokens))
    found = {
        "micro_batches": len(held),
        "extra": len(held) - needed,
        "over_the_cap": int((np.ceil(tokens - 1e-6) > case.max_tokens).sum()),
        "empty": sum(not rank for m in held for rank in m),
        "per_micro_batch": path(cost),
        "per_step": float(cost.sum(axis=0).max() * case.num_ranks / cost.sum()),
    }
    if vision is not None:
        found["vision"] = path(of_ranks(vision))
    if case.family == SHARED:
        shared = 100 * float(lengths[degree > 1].sum() / lengths.sum())
        found |= {"attention": path(attention), "shared_%": shared}
    return found


def run(load: Callable[[], Side | None], todo: list[Case]) -> list[dict[str, Any]]:
    """One side on all steps; in a process of its own."""
    side, rows = load(), []
    if side is None:
        return rows
    for case in todo:
        found = []
        for lengths, vision in case.steps:
            times: list[float] = []
            while len(times) < 5 and sum(times) < 0.5:  # what is quick is asked again
                begin = time.perf_counter()
                plan = side(case, lengths, vision)
                times.append(1000 * (time.perf_counter() - begin))
            held = held_of(plan) if isinstance(plan, StepPlan) else plan
            found.append({**measure(held, case, lengths, vision), "milliseconds": median(times)})
        mean = {key: fmean(values[key] for values in found) for key in found[0]}
        rows.append({"case": case.name, **mean})
    return rows


def least(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Of every column the best, and whose it is."""
    best = {}
    for column in (name for name in rows[0] if name not in ("case", "side", "shared_%")):
        value, side = min((row[column], row["side"]) for row in rows if row[column] is not None)
        best[column] = f"{value:.4g} ({side})"
    return best


def of_peer(peer: Peer) -> Side | None:
    plan = planner(peer)
    return plan and (lambda case, n, _: plan(n.tolist(), case.num_ranks, case.max_tokens))


def main() -> None:
    todo, results, peers, best = cases(), {}, [], []
    for family, theirs in PEERS.items():
        mine = [case for case in todo if case.family == family]
        sides: dict[str, Callable[[], Side | None]] = {
            "megapack": lambda: partial(ours, "micro_batches"),
            "megapack, step": lambda: partial(ours, "step"),
            "Karmarkar-Karp": lambda: karmarkar_karp,
            **{name: partial(of_peer, peer) for name, peer in theirs.items()},
        }
        rows = []
        for name, load in sides.items():
            own = [c for c in mine if name not in theirs or c.num_ranks < theirs[name].slow]
            found = in_child(partial(run, load, own))
            if found and name in theirs:
                peers.append({"peer": name, "plans": family, "commit": version(theirs[name])})
                if theirs[name].one_by_one:  # its micro batches are of another kind
                    found = [{**row, **dict.fromkeys(COUNTS)} for row in found]
            rows += [{"side": name, **row} for row in found]
        order = [case.name for case in mine]
        results[family] = sorted(rows, key=lambda row: order.index(row["case"]))
        others = [row for row in rows if "megapack" not in row["side"]]
        best += [{"case": c, **least([r for r in others if r["case"] == c])} for c in order]
        show(family, results[family])
    show("best of the others", best)
    write_results("plan", {"peers": peers, "best of the others": best, **results})


if __name__ == "__main__":
    main()
