"""make bench-packing: every packing strategy beside its rivals, on the same lengths.

Nanoseconds per document, the same over what numpy takes for one pass (``np.cumsum``, which depends
less on the machine), peak memory, samples over the least possible, and times faster than the peer.
Strategy, peer and pass are warmed and take turns in one process. One core unless said; index arrays
in memory. What the strategies make of the documents: ``make bench-composition``.

QUICK=1: up to a million documents, less than a minute. LARGE=1: up to 1e8.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from common import in_child, large, quick, show, take_turns, write_results
from lengths import LAWS
from numpy.typing import NDArray
from packing_peers import PEERS, TRL_PLAN, TRL_WHOLE

from megapack.packing import STRATEGIES, pack

CAPACITY = 4096
BUCKETS = [1024, 2048, 4096]
FILE_ORDER, SHUFFLED = "megatron index, file order", "megatron shuffle + index"
# Beyond so many documents a peer takes minutes, or its tokens gigabytes.
LARGEST = {TRL_PLAN: 1_000_000, TRL_WHOLE: 100_000}

Lengths = NDArray[np.int32]


@dataclass(frozen=True)
class Case:
    """A strategy; ``goal``: passes of numpy to stay below at 1e7; ``peer``: whom to beat."""

    name: str
    strategy: str
    parameters: dict[str, Any] = field(default_factory=dict)
    goal: float | None = None
    peer: str | None = None


CASES = [
    Case("concat, file order", "concat", {"shuffle": False}, 2, FILE_ORDER),
    Case("concat, shuffled", "concat", {}, 8, SHUFFLED),
    Case("first_fit_decreasing", "first_fit_decreasing", {}, 4, TRL_PLAN),
    Case("best_fit_decreasing", "best_fit_decreasing", {}, 4, TRL_PLAN),
    Case("best_fit_decreasing (peer: all of trl)", "best_fit_decreasing", {}, None, TRL_WHOLE),
    Case("seamless", "seamless", {}, 6),
    Case("bucket", "bucket", {}, 8),
    Case("bucket_v0", "bucket_v0", {}, 8),
    Case("bucket_llm", "bucket_llm", {}, 8),
    Case("bucket_llm, pools of 3000", "bucket_llm", {"preset": "paper"}),
    Case("bucket_llm, streamed", "bucket_llm", {"pool": "stream", "pool_size": 10_000}),
    Case("bucket_naive", "bucket_naive"),
    Case("next_fit", "next_fit"),
    Case("length_sorted", "length_sorted"),
    Case("pad", "pad"),
    Case("decompose", "decompose"),
]


def main() -> None:
    sizes = [100_000, 1_000_000] if quick() else [100_000, 1_000_000, 10_000_000]
    sizes += [100_000_000] if large() else []
    rows = [row for size in sizes for row in measure(size)]
    write_results("packing", rows)
    for size in sizes:
        show(
            f"{size:,} documents, {CAPACITY} tokens (buckets {BUCKETS})",
            [row for row in rows if row["num_documents"] == size],
            *("name", "ns_per_document", "spread_%", "over_cumsum", "goal", "2_threads", "peak_mb"),
            *("extra_bytes_per_document", "excess_%", "times_faster", "peer"),
        )


def measure(num_documents: int) -> list[dict[str, Any]]:
    """One row per strategy."""
    lengths = LAWS["fineweb_edu_like"](num_documents)
    rows = []
    for case in CASES:
        memory = in_child(partial(memory_of, case, lengths))
        peak, output = memory["peak_bytes"], memory["output_bytes"]
        rows.append(
            {"name": case.name, "strategy": case.strategy, "num_documents": num_documents}
            | in_child(partial(times_of, case, lengths))
            | {"peak_mb": peak / 1e6, "extra_bytes_per_document": (peak - output) / num_documents}
            | {"goal": case.goal if num_documents == 10_000_000 else None}
            | {"excess_%": memory["excess_%"]}
        )
        print(f"{num_documents:,} documents: {case.name}", file=sys.stderr)
    return rows


def call_of(case: Case, lengths: Lengths, **options: Any) -> Any:
    """The call that is measured."""
    buckets = BUCKETS if STRATEGIES[case.strategy].many_buckets else [CAPACITY]
    return partial(pack, lengths, case.strategy, buckets=buckets, **case.parameters, **options)


def memory_of(case: Case, lengths: Lengths) -> dict[str, Any]:
    """Of one call, in a process that has done nothing else."""
    index = call_of(case, lengths)()
    excess = index.num_samples / least(lengths) - 1
    one_bucket = not STRATEGIES[case.strategy].many_buckets
    return {
        "output_bytes": sum(array.nbytes for array in index.segment_arrays()),
        "excess_%": 100 * excess if one_bucket else None,
    }


def times_of(case: Case, lengths: Lengths) -> dict[str, Any]:
    """The strategy with one thread and two, a pass of numpy, and the peer."""
    sides: dict[str, Callable[[], Any]] = {
        "ours": call_of(case, lengths),
        "2 threads": call_of(case, lengths, threads=2),
        "pass": partial(np.cumsum, lengths, dtype=np.int64),
    }
    peer = case.peer
    if peer and len(lengths) <= LARGEST.get(peer, 1 << 40):
        sides["peer"] = PEERS[peer](lengths, CAPACITY)
    found = take_turns(sides, seconds=0.05)
    ours = found["ours"]
    row = ours.row() | {
        "ns_per_document": 1e9 * ours.seconds / len(lengths),
        "over_cumsum": ours.seconds / found["pass"].seconds,
        "2_threads": ours.seconds / found["2 threads"].seconds,
    }
    if "peer" not in sides:
        return row
    samples = sides["peer"]() if len(lengths) <= 100_000 else None
    return row | {
        "peer": peer,
        "times_faster": found["peer"].seconds / ours.seconds,
        "peer_seconds": found["peer"].seconds,
        "peer_spread_%": 100 * found["peer"].spread,
        "peer_excess_%": None if samples is None else 100 * (samples / least(lengths) - 1),
    }


def least(lengths: Lengths) -> int:
    """Samples below which no packing gets."""
    return -(-int(lengths.sum(dtype=np.int64)) // CAPACITY)


if __name__ == "__main__":
    main()
