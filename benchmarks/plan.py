"""``make bench-plan``: one step's documents dealt to ranks and micro batches, beside others' ways.

Web pages up to 131,072 tokens, 65,536 tokens per rank and step, 8,192 per rank and micro batch, a
model of hidden size 4,096; 16, 64 and 512 ranks. Of each side:

* attention, model: length of the step over the ideal, ranks meeting at every micro batch (mean and
  worst of the steps); model_per_step: ranks meeting once.
* extra micro batches over what the tokens need (mean); tokens of the fullest rank over the budget.
* shared_%: tokens of documents that more than one rank holds, which is communication.
* milliseconds per step, and over ours.

MEGATRON_LM=PATH adds the planner of a Megatron-LM checkout of branch dev. The second table is a
step of RL or SFT: no document shared, 16,384 tokens per rank and micro batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from common import quick, show, write_results
from lengths import LAWS
from numpy.typing import NDArray
from plan_peers import Held, karmarkar_karp, megatron, random_dealing

from megapack.planning import plan_step

TOKENS_PER_RANK, MAX_TOKENS, LONGEST = 65_536, 8192, 131_072
LINEAR_LENGTH = 12 * 4096
STEPS = {16: 20, 64: 20, 512: 3}
SLOW = 512  # ranks from which on Megatron's planner is left out: minutes a step

Lengths = NDArray[np.int64]


def steps(lengths: Lengths, tokens: int, count: int) -> list[Lengths]:
    """Consecutive documents: as many as `tokens` hold, then the next step."""
    found, begin = [], 0
    for _ in range(count):
        ends = np.cumsum(lengths[begin : begin + tokens // 100])
        size = int(np.searchsorted(ends, tokens, side="right"))
        found.append(lengths[begin : begin + size])
        begin += size
    return found


def ours(lengths: Lengths, num_ranks: int, max_tokens: int, max_degree: int) -> Held:
    plan = plan_step(
        lengths,
        num_ranks=num_ranks,
        max_tokens_per_rank=max_tokens,
        max_degree=max_degree,
        linear_length=LINEAR_LENGTH,
    )
    ranks = [plan.of_rank(rank) for rank in range(num_ranks)]
    return [[r[m].tolist() for r in ranks] for m in range(plan.num_micro_batches)]


def measure(held: Held, lengths: Lengths, max_tokens: int) -> dict[str, float]:
    """What a dealing is worth, recomputed from the documents that each rank holds."""
    degree = np.bincount(
        [i for micro_batch in held for rank in micro_batch for i in rank], minlength=len(lengths)
    )
    assert degree.min() >= 1, "a document was lost"
    tokens = np.array([[(lengths[r] / degree[r]).sum() for r in m] for m in held])
    attention = np.array([[(lengths[r] ** 2 / degree[r]).sum() for r in m] for m in held])
    model = attention + LINEAR_LENGTH * tokens
    num_ranks = tokens.shape[1]
    return {
        "attention": attention.max(1).sum() * num_ranks / attention.sum(),
        "model": model.max(1).sum() * num_ranks / model.sum(),
        "model_per_step": model.sum(0).max() * num_ranks / model.sum(),
        "extra_micro_batches": len(held) + -lengths.sum() // (num_ranks * max_tokens),
        "tokens": tokens.max() / max_tokens,
        "shared_%": 100 * lengths[degree > 1].sum() / lengths.sum(),
    }


def run(
    case: str,
    sides: dict[str, Callable[[Lengths], Held]],
    batches: list[Lengths],
    max_tokens: int,
    plan: Callable[[Lengths], Any],
) -> list[dict[str, Any]]:
    """All sides on the same steps, in turns; `plan` is what ours is timed by."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    plan(batches[0])
    for lengths in batches:
        for name, side in sides.items():
            begin = time.perf_counter()
            held = side(lengths)
            seconds = time.perf_counter() - begin
            if name == "megapack":  # `of_rank` of all ranks is the measurement's, not a rank's
                begin = time.perf_counter()
                plan(lengths)
                seconds = time.perf_counter() - begin
            values = measure(held, lengths, max_tokens)
            found[name].append({**values, "milliseconds": 1000 * seconds})
    rows = []
    for name, each in found.items():
        mean = {key: float(np.mean([v[key] for v in each])) for key in each[0]}
        mean["milliseconds"] = float(np.median([v["milliseconds"] for v in each]))
        worst = {f"{key}_worst": max(v[key] for v in each) for key in ("attention", "model")}
        rows.append({"case": case, "side": name, "steps": len(each), **mean, **worst})
    for row in rows:
        row["time_over_ours"] = row["milliseconds"] / rows[0]["milliseconds"]
    return rows


def pretraining() -> list[dict[str, Any]]:
    lengths = LAWS["fineweb_edu_like"](1_000_000, 1).astype(np.int64)
    theirs, rows = megatron(), []
    static = LONGEST // MAX_TOKENS
    for num_ranks, count in STEPS.items():
        rules = {"num_ranks": num_ranks, "max_tokens": MAX_TOKENS}
        sides: dict[str, Callable[[Lengths], Held]] = {
            "megapack": partial(ours, **rules, max_degree=min(num_ranks, 64))
        }
        if theirs and num_ranks < SLOW:
            sides["Megatron"] = lambda n, num_ranks=num_ranks: theirs(
                n.tolist(), num_ranks, MAX_TOKENS
            )
        sides["Karmarkar-Karp"] = lambda n, rules=rules: karmarkar_karp(
            n.tolist(), **rules, degree=static, linear_length=LINEAR_LENGTH
        )
        sides["random"] = lambda n, rules=rules: random_dealing(n.tolist(), **rules, degree=static)
        plan = partial(
            plan_step, num_ranks=num_ranks, max_tokens_per_rank=MAX_TOKENS,
            max_degree=min(num_ranks, 64), linear_length=LINEAR_LENGTH,
        )  # fmt: skip
        batches = steps(lengths, num_ranks * TOKENS_PER_RANK, 1 if quick() else count)
        rows += run(f"{num_ranks} ranks", sides, batches, MAX_TOKENS, plan)
    return rows


def finetuning() -> list[dict[str, Any]]:
    """1,024 sequences of 200 to 8,000 tokens and 512 of a heavy tail, on 8 and 64 ranks."""
    generator, rows = np.random.default_rng(1), []
    max_tokens = 16_384
    for case, num_ranks, draw in (
        ("uniform, 8 ranks", 8, lambda: generator.integers(200, 8000, 1024)),
        ("heavy tail, 8 ranks", 8, lambda: generator.lognormal(7, 1, 512).clip(50, max_tokens)),
        ("uniform, 64 ranks", 64, lambda: generator.integers(200, 8000, 1024)),
    ):
        rules = {"num_ranks": num_ranks, "max_tokens": max_tokens}
        sides: dict[str, Callable[[Lengths], Held]] = {
            "megapack": partial(ours, **rules, max_degree=1),
            "Karmarkar-Karp": lambda n, rules=rules: karmarkar_karp(
                n.tolist(), **rules, degree=1, linear_length=LINEAR_LENGTH
            ),
            "random": lambda n, rules=rules: random_dealing(n.tolist(), **rules, degree=1),
        }
        plan = partial(plan_step, num_ranks=num_ranks, max_tokens_per_rank=max_tokens)
        batches = [draw().astype(np.int64) for _ in range(2 if quick() else 10)]
        rows += run(case, sides, batches, max_tokens, plan)
    return rows


def main() -> None:
    rows, tuned = pretraining(), finetuning()
    write_results("plan", [*rows, *tuned])
    columns = (
        *("case", "side", "steps", "attention", "attention_worst", "model", "model_worst"),
        *("model_per_step", "extra_micro_batches", "tokens", "shared_%"),
        *("milliseconds", "time_over_ours"),
    )
    show("RL and SFT: no document shared", tuned, *columns)
    show("pretraining: documents up to 131,072 tokens", rows, *columns)


if __name__ == "__main__":
    main()
