"""The planners of others, run where they are: each a function (lengths, ranks, cap) -> ``Held``.

A variable names the checkout of each, and nothing of it is copied: VERL, SLIME, NEMO_RL, PRIME_RL,
TRL (before 1.16, which plans prefix trees), MEGATRON_LM (main) and MEGATRON_LM_DEV. They plan by
the cost of the benchmark where they take one, and build no tensors. Each runs in a process of its
own: two Megatrons cannot be imported into one.
"""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

__all__ = ["LINEAR_LENGTH", "PEERS", "Held", "Peer", "planner", "version"]

Held = list[list[list[int]]]  # micro batch, rank -> documents
Plan = Callable[[list[int], int, int], Held]

LINEAR_LENGTH = 24_576  # verl's formula for 7B: a document of n tokens costs 24,576 n + n^2


def side_by_side(ranks: list[list[list[int]]]) -> Held:
    """The micro batches of every rank beside each other; some may have fewer."""
    return [list(micro_batch) for micro_batch in itertools.zip_longest(*ranks, fillvalue=[])]


def verl() -> Plan:
    """``_balance_batch`` of its trainer, then ``rearrange_micro_batches`` on every rank, in as many
    micro batches as the fullest rank needs."""
    import torch  # noqa: PLC0415

    theirs = importlib.import_module("verl.utils.seqlen_balancing")
    theirs.tu = SimpleNamespace(index_select_tensor_dict=lambda *_: None)

    def plan(lengths: list[int], num_ranks: int, max_tokens: int) -> Held:
        tokens = torch.tensor(lengths)
        costs = theirs.calculate_workload(tokens).tolist()
        equal = len(lengths) % num_ranks == 0  # as many documents on every rank; must be, there
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
    """First fit, then Karmarkar-Karp over bins (``balance_data``); ``balance_by_flops`` would break
    the cap."""
    theirs = importlib.import_module("slime.utils.dp_schedule")
    # Its ``flops_utils`` then say n (24,576 + n).
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
    """Modified first fit decreasing; ``shard_by_batch_size`` gives rank r every bin r + k ranks."""
    theirs = importlib.import_module("nemo_rl.data.packing.algorithms")

    def plan(lengths: list[int], num_ranks: int, max_tokens: int) -> Held:
        of_ranks = {"min_bin_count": num_ranks, "bin_count_multiple": num_ranks}
        packer = theirs.get_packer("modified_first_fit_decreasing", max_tokens, **of_ranks)
        bins = packer.pack(lengths)
        return side_by_side([bins[rank::num_ranks] for rank in range(num_ranks)])

    return plan


def prime_rl() -> Plan:
    """First fit decreasing, then Karmarkar-Karp over bins and exchanges of pairs."""
    theirs = importlib.import_module("prime_rl.trainer.batch")
    theirs._materialize_bin = lambda content: content

    def cost(lengths: list[int]) -> int:
        return sum(n * (LINEAR_LENGTH + n) for n in lengths)

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
    """``TokenBudgetBatcher`` of asynchronous GRPO, which sees one document at a time."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    theirs = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")

    def plan(lengths: list[int], num_ranks: int, max_tokens: int) -> Held:
        # Its stream never ends: documents of the cap push out the last rows.
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
    variable: str  # names its checkout
    slow: int = 1 << 30  # ranks from which on it is left out: minutes a step
    folders: tuple[str, ...] = ("",)  # of the checkout, to import from
    one_by_one: bool = False  # ranks forward document by document; the cap is a document's


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


def planner(peer: Peer) -> Plan | None:
    """Its planner, imported now; None without its checkout or what that needs."""
    checkout = os.environ.get(peer.variable)
    sys.path[:0] = [f"{checkout}/{folder}" for folder in peer.folders if checkout]
    try:
        return peer.load() if checkout else None
    except ImportError as error:
        print(f"{peer.variable}: {error}")
        return None


def version(peer: Peer) -> str:
    """The commit of its checkout."""
    git = ["git", "-C", os.environ[peer.variable], "rev-parse", "HEAD"]
    return subprocess.check_output(git, text=True).strip()
