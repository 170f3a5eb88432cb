"""``make bench-plan``: assignments of a step's documents to ranks, compared with other planners.

Whole documents (SFT, RL), with a limit on the tokens of a rank in a micro batch:

* reason: 2,048 documents: prompts of 100 to 600 tokens in groups of 16, answers lognormal (median
  4,000, sigma .9), at most 32,768; limit 33,792.
* agent: 2,048 documents, lognormal (12,000, .9), at most 65,536, which is the limit.
* images: 600 documents, 60 % with one to eight images; costs of vision encoder and language model.

Documents that ranks may share (pretraining): web pages up to 131,072 tokens, 65,536 tokens per rank
and step, limit 8,192.

Columns (means over the steps): micro batches per rank, and how many of them exceed the minimum for
the tokens; pairs of rank and micro batch that exceed the limit, and pairs without a document;
duration of the step divided by the ideal, once with ranks that synchronize at every micro batch and
once with ranks that synchronize at the end only (a document of n tokens costs 24,576 n + n^2,
shared 49,152 n + n^2); the first of these two again for the vision encoder's cost, and for
attention alone; milliseconds.

Other projects' planners run from their checkouts, each in a separate process (two Megatrons cannot
be imported into one); no code is copied. Environment variables name the checkouts: VERL, SLIME,
NEMO_RL, PRIME_RL, TRL (before 1.16, which plans prefix trees), MEGATRON_LM (main) and
MEGATRON_LM_DEV; a missing one is reported and skipped. They use the cost of the benchmark if they
accept one, and build no tensors.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import checkout_commit, in_child, peer_of, quick, show, timed, write_results
from lengths import LAWS
from numpy.typing import NDArray

from megapack.planning import ASSIGNMENTS, Cluster, StepPlan, plan_step

# ---- Planners of other projects: each (lengths, ranks, cap) -> Held ------------------------------

Held = list[list[list[int]]]  # micro batch, rank -> documents
Plan = Callable[[list[int], int, int], Held]

LINEAR_COST_TOKENS = 24_576  # verl's formula for 7B: a document of n tokens costs 24,576 n + n^2


def side_by_side(ranks: list[list[list[int]]]) -> Held:
    """Turn lists of micro batches by rank into ranks by micro batch; fill missing ones with []."""
    return [list(micro_batch) for micro_batch in itertools.zip_longest(*ranks, fillvalue=[])]


def verl() -> Plan:
    """Return verl's planner: ``_balance_batch`` of its trainer, then ``rearrange_micro_batches`` on
    every rank, with as many micro batches as the fullest rank needs."""
    import torch  # noqa: PLC0415

    theirs = importlib.import_module("verl.utils.seqlen_balancing")
    theirs.tu = SimpleNamespace(index_select_tensor_dict=lambda *_: None)

    def plan(lengths: list[int], num_ranks: int, max_tokens: int) -> Held:
        tokens = torch.tensor(lengths)
        costs = theirs.calculate_workload(tokens).tolist()
        equal = len(lengths) % num_ranks == 0  # verl requires equal counts on all ranks
        ranks = theirs.get_seqlen_balanced_partitions(costs, num_ranks, equal_size=equal)
        most = max(-(-sum(lengths[i] for i in rank) // max_tokens) for rank in ranks)
        dealt = []
        for rank in ranks:
            offsets = torch.nn.functional.pad(tokens[rank].cumsum(0), (1, 0))
            ids = SimpleNamespace(is_nested=True, offsets=lambda offsets=offsets: offsets)
            batch = {"input_ids": ids}
            _, parts = theirs.rearrange_micro_batches(batch, max_tokens, min_num_micro_batch=most)
            dealt.append([[rank[i] for i in part] for part in parts])
        return side_by_side(dealt)

    return plan


def slime() -> Plan:
    """Return slime's planner: first fit, then Karmarkar-Karp over bins (``balance_data``);
    ``balance_by_flops`` would exceed the cap."""
    theirs = importlib.import_module("slime.utils.dp_schedule")
    # With these sizes, its ``flops_utils`` return n (24,576 + n).
    layer = {"hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 4}
    layer |= {"kv_channels": 128, "ffn_hidden_size": 5120, "vocab_size": 0, "num_layers": 1}

    def plan(lengths: list[int], num_ranks: int, max_tokens: int) -> Held:
        rules = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": max_tokens}
        rules |= {"balance_data": True, "balance_by_flops": False, "num_experts": None}
        args = SimpleNamespace(**rules, **layer)
        parallel = {"dp_size": num_ranks, "cp_size": 1, "vpp_size": 1}
        parallel |= {"microbatch_group_size_per_vp_stage": 1}
        prompts = {"global_batch_size": len(lengths), "rollout_indices": range(len(lengths))}
        parts, batches, _, _ = theirs.build_dp_schedule(args, parallel, lengths, **prompts)
        ranks = zip(parts, batches, strict=True)
        return side_by_side([[[part[i] for i in m] for m in batch] for part, batch in ranks])

    return plan


def nemo_rl() -> Plan:
    """Return NeMo RL's planner: modified first fit decreasing; rank r has the bins r, r + ranks,
    r + 2 ranks, ... (``shard_by_batch_size``)."""
    theirs = importlib.import_module("nemo_rl.data.packing.algorithms")

    def plan(lengths: list[int], num_ranks: int, max_tokens: int) -> Held:
        of_ranks = {"min_bin_count": num_ranks, "bin_count_multiple": num_ranks}
        packer = theirs.get_packer("modified_first_fit_decreasing", max_tokens, **of_ranks)
        bins = packer.pack(lengths)
        return side_by_side([bins[rank::num_ranks] for rank in range(num_ranks)])

    return plan


def prime_rl() -> Plan:
    """Return prime-rl's planner: first fit decreasing, then Karmarkar-Karp over bins and exchanges
    of pairs."""
    theirs = importlib.import_module("prime_rl.trainer.batch")
    theirs._materialize_bin = lambda content: content

    def cost(lengths: list[int]) -> int:
        return sum(n * (LINEAR_COST_TOKENS + n) for n in lengths)

    def plan(lengths: list[int], num_ranks: int, max_tokens: int) -> Held:
        samples = [
            SimpleNamespace(input_ids=range(n), number=i, routed_experts=None, mm_kwargs=None)
            for i, n in enumerate(lengths)
        ]
        bins = theirs.packed_samples_into_micro_bs(samples, max_tokens, num_ranks, cost)
        parts = theirs.balanced_partition([b.workload(cost) for b in bins], num_ranks)
        return side_by_side([[[s.number for s in bins[i].samples] for i in part] for part in parts])

    return plan


def trl() -> Plan:
    """Return TRL's ``TokenBudgetBatcher`` (asynchronous GRPO), which reads document by document."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    theirs = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")

    def plan(lengths: list[int], num_ranks: int, max_tokens: int) -> Held:
        # Its stream never ends: final documents as long as the cap flush the last rows.
        ends = [(-1, max_tokens)] * (num_ranks + 1)
        stream = ({"input_ids": range(n), "number": i} for i, n in [*enumerate(lengths), *ends])
        rows = theirs.TokenBudgetBatcher(stream, num_ranks, max_tokens)
        held = [[[s["number"] for s in row if s["number"] >= 0] for row in batch] for batch in rows]
        return [micro_batch for micro_batch in held if any(micro_batch)]

    return plan


def megatron(module: str, scheduler: str) -> Callable[[], Plan]:
    def load() -> Plan:
        theirs = getattr(importlib.import_module(f"megatron.core.{module}"), scheduler)

        def plan(lengths: list[int], num_ranks: int, max_tokens: int) -> Held:
            documents, ranks = list(enumerate(lengths)), SimpleNamespace(size=lambda: num_ranks)
            if scheduler == "BalancedCPScheduler":
                return theirs(max_tokens, ranks).get_groups_and_subsamples(documents, None)[1]
            return theirs(max_tokens, 1, num_ranks, None).get_groups_and_subsamples(documents)

        return plan

    return load


@dataclass(frozen=True)
class Peer:
    load: Callable[[], Plan]
    variable: str  # environment variable with the checkout
    slow: int = 1 << 30  # skip the peer from this many ranks on: a step takes minutes
    folders: tuple[str, ...] = ("",)  # folders of the checkout to import from
    one_by_one: bool = False  # ranks run one document at a time; the cap is per document


_CONFIGS = ("src", "packages/prime-rl-configs/src")
_IN_ORDER = megatron("datasets.data_schedule", "DpBalancedScheduler")
_DYNAMIC = megatron("datasets.data_schedule", "DefaultDynamicCPScheduler")
_HYBRID = megatron("pipeline_parallel.hybrid_cp_schedule", "BalancedCPScheduler")

PEERS: dict[str, dict[str, Peer]] = {
    "documents whole": {
        "verl": Peer(verl, "VERL"),
        "slime": Peer(slime, "SLIME"),
        "NeMo RL": Peer(nemo_rl, "NEMO_RL"),
        "prime-rl": Peer(prime_rl, "PRIME_RL", slow=64, folders=_CONFIGS),
        "TRL": Peer(trl, "TRL"),
        "Megatron main": Peer(_IN_ORDER, "MEGATRON_LM"),
        "Megatron dev": Peer(_IN_ORDER, "MEGATRON_LM_DEV"),
    },
    "documents shared": {
        "Megatron main": Peer(_HYBRID, "MEGATRON_LM", slow=512, one_by_one=True),
        "Megatron dev": Peer(_DYNAMIC, "MEGATRON_LM_DEV", slow=512),
    },
}


# ---- What is measured ---------------------------------------------------------------------------

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
    linear_cost_tokens: int = LINEAR_COST_TOKENS


def cases() -> list[Case]:
    """Return all cases: three seeds of each; for web pages, consecutive steps."""

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
    language = lengths * (case.linear_cost_tokens + lengths)
    return plan_step(
        lengths, num_ranks=case.num_ranks, max_tokens_per_rank=case.max_tokens,
        max_context_parallel_size=min(case.num_ranks, 64) if case.family == SHARED else 1,
        costs=None if vision is None else np.stack([language, vision], axis=1),
        linear_cost_tokens=case.linear_cost_tokens, balance=balance,
    )  # fmt: skip


def karmarkar_karp(case: Case, lengths: Lengths, _vision: Numbers | None) -> Held:
    """Plan with one context parallel size: what the longest document of the corpus needs."""
    degree = LONGEST // case.max_tokens if case.family == SHARED else 1
    cluster = Cluster(data_parallel=case.num_ranks // degree, context_parallel=degree)
    plan = ASSIGNMENTS["Karmarkar-Karp"](lengths, cluster, case.max_tokens, case.linear_cost_tokens)
    rising = np.argsort(lengths, kind="stable")  # a planner returns lengths, not document numbers
    number = np.empty(len(lengths), np.int64)
    number[np.argsort(plan.lengths, kind="stable")] = rising
    return [[number[rank].tolist() for rank in m] for m in held_of(plan)]


def held_of(plan: StepPlan) -> Held:
    return [[rank.tolist() for rank in m] for m in zip(*plan.index_lists(), strict=True)]


def measure(held: Held, case: Case, lengths: Lengths, vision: Numbers | None) -> dict[str, float]:
    """Compute the columns of an assignment from the documents of each rank."""
    degree = np.bincount([i for m in held for rank in m for i in rank], minlength=len(lengths))
    assert degree.min() >= 1, "a document was lost"
    assert case.family == SHARED or degree.max() == 1, "a document was given twice"

    def of_ranks(values: Numbers) -> Numbers:
        return np.array([[(values[r] / degree[r]).sum() for r in m] for m in held])

    def path(work: Numbers) -> float:
        return float(work.max(axis=1).sum() * case.num_ranks / work.sum())

    tokens, attention = of_ranks(lengths.astype(float)), of_ranks(lengths.astype(float) ** 2)
    cost = attention + case.linear_cost_tokens * tokens
    needed = -(-int(lengths.sum()) // (case.num_ranks * case.max_tokens))
    found = {
        "micro_batches": len(held), "extra": len(held) - needed,
        "over_the_cap": int((np.ceil(tokens - 1e-6) > case.max_tokens).sum()),
        "empty": sum(not rank for m in held for rank in m), "per_micro_batch": path(cost),
        "per_step": float(cost.sum(axis=0).max() * case.num_ranks / cost.sum()),
    }  # fmt: skip
    if vision is not None:
        found["vision"] = path(of_ranks(vision))
    if case.family == SHARED:
        shared = 100 * float(lengths[degree > 1].sum() / lengths.sum())
        found |= {"attention": path(attention), "shared_%": shared}
    return found


def run(load: Callable[[], Side | None], todo: list[Case]) -> list[dict[str, Any]]:
    """Run one side on all steps, in a separate process."""
    side, rows = load(), []
    if side is None:
        return rows
    for case in todo:
        found = []
        for lengths, vision in case.steps:
            times: list[float] = []
            while len(times) < 5 and sum(times) < 0.5:  # repeat quick calls
                seconds, plan = timed(partial(side, case, lengths, vision))
                times.append(1000 * seconds)
            held = held_of(plan) if isinstance(plan, StepPlan) else plan
            found.append({**measure(held, case, lengths, vision), "milliseconds": median(times)})
        mean = {key: fmean(values[key] for values in found) for key in found[0]}
        rows.append({"case": case.name, **mean})
    return rows


def least(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return column -> smallest value and its side."""
    best = {}
    for column in (name for name in rows[0] if name not in ("case", "side", "shared_%")):
        value, side = min((row[column], row["side"]) for row in rows if row[column] is not None)
        best[column] = f"{value:.4g} ({side})"
    return best


def of_peer(name: str, peer: Peer) -> Side | None:
    plan = peer_of(name, peer.load, peer.variable, *peer.folders)
    return plan and (lambda case, n, _: plan(n.tolist(), case.num_ranks, case.max_tokens))


def main() -> None:
    todo, results, peers, best = cases(), {}, [], []
    for family, theirs in PEERS.items():
        mine = [case for case in todo if case.family == family]
        sides: dict[str, Callable[[], Side | None]] = {
            "megapack": lambda: partial(ours, "micro_batches"),
            "megapack, step": lambda: partial(ours, "step"),
            "Karmarkar-Karp": lambda: karmarkar_karp,
            **{name: partial(of_peer, name, peer) for name, peer in theirs.items()},
        }
        rows = []
        for name, load in sides.items():
            own = [c for c in mine if name not in theirs or c.num_ranks < theirs[name].slow]
            found = in_child(partial(run, load, own))
            if found and name in theirs:
                commit = checkout_commit(theirs[name].variable)
                peers.append({"peer": name, "plans": family, "commit": commit})
                if theirs[name].one_by_one:  # micro batches not comparable
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
