"""make bench-packing: every packing strategy and its rivals on the same lengths.

First figures of the papers beside ours (all of them: make bench-composition), then speed and
memory: nanoseconds per document, peak memory, samples over the least possible, times faster than
the peer. One core unless said; index arrays in memory.

QUICK=1: up to a million documents, less than a minute. LARGE=1: up to 1e8.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from common import Table, best_of, in_child, large, quick, write_results
from composition import show
from lengths import LAWS
from numpy.typing import NDArray
from packing_peers import PEERS, TRL_PLAN, TRL_WHOLE
from papers.composition import blog, bucketllm, seamless
from papers.composition.rows import Row

from megapack.packing import STRATEGIES, pack

CAPACITY = 4096
BUCKETS = [1024, 2048, 4096]
FILE_ORDER, SHUFFLED = "megatron index, file order", "megatron shuffle + index"
# Beyond so many documents a peer takes minutes, or its tokens gigabytes.
LARGEST = {TRL_PLAN: 1_000_000, TRL_WHOLE: 100_000}

Lengths = NDArray[np.int32]


@dataclass(frozen=True)
class Case:
    """A strategy; ``target``: ns per document to stay below at 1e7; ``peer``: whom to beat."""

    name: str
    strategy: str
    parameters: dict[str, Any] = field(default_factory=dict)
    target: float | None = None
    peer: str | None = None


CASES = [
    Case("concat, file order", "concat", {"shuffle": False}, 3, FILE_ORDER),
    Case("concat, shuffled", "concat", {}, 14, SHUFFLED),
    Case("first_fit_decreasing", "first_fit_decreasing", {}, 6, TRL_PLAN),
    Case("best_fit_decreasing", "best_fit_decreasing", {}, 6, TRL_PLAN),
    Case("seamless", "seamless", {}, 9),
    Case("bucket", "bucket", {}, 12),
    Case("bucket_v0", "bucket_v0", {}, 12),
    Case("bucket_llm", "bucket_llm", {}, 12),
    Case("bucket_llm, pools of 3000", "bucket_llm", {"preset": "paper"}),
    Case("bucket_llm, streamed", "bucket_llm", {"pool": "stream", "pool_size": 10_000}),
    Case("bucket_naive", "bucket_naive"),
    Case("next_fit", "next_fit"),
    Case("length_sorted", "length_sorted"),
    Case("pad", "pad"),
    Case("decompose", "decompose"),
]


def main() -> None:
    quality = quality_rows(300_000 if quick() else 10_000_000)
    show(quality)
    sizes = [100_000, 1_000_000] if quick() else [100_000, 1_000_000, 10_000_000]
    sizes += [100_000_000] if large() else []
    speed = [row for size in sizes for row in measure(size)]
    for size in sizes:
        report(size, [row for row in speed if row["num_documents"] == size])
    write_results("packing", {"speed": speed, "quality": [asdict(row) for row in quality]})


def quality_rows(num_documents: int) -> list[Row]:
    """BucketLLM Table 1; Seamless 4.8, I.1 and Table 9; the blog's utilization; our goals."""
    law = LAWS["fineweb_edu_like"](num_documents)
    return [
        *bucketllm.table_1(law, "fineweb_edu_like"),
        *seamless.section_4_8(),
        *seamless.dropping(),
        *seamless.table_9(num_documents=num_documents // 10),
        *blog.strategies(),
        *goals(num_documents),
    ]


def goals(num_documents: int) -> list[Row]:
    """The default strategy where short documents are missing, without and with `refine`."""
    rows = []
    buckets = [1024, 2048, 4096, 8192, 16384]
    for law in ("fineweb_edu_like", "finance", "bbc_news", "pubmed"):
        lengths = LAWS[law](num_documents)
        for item, parameters in (
            ("promote off", {"promote": "off"}),
            ("default", {}),
            ("refine", {"refine": True}),
        ):
            index = pack(lengths, buckets=buckets, **parameters)
            metrics = index.metrics()
            assert metrics["truncation_ratio"] == metrics["truncation_floor"]
            decided = ((name, text.split(":")[0]) for name, text in index.decisions.items())
            why = "; ".join(f"{name} {choice}" for name, choice in decided)
            row = partial(Row, source="bucket, nothing cut", corpus=law, paper=None, item=item)
            rows += [
                row(quantity="r_pad %", measured=100 * metrics["padding_ratio"], why=why),
                row(quantity="r_cat", measured=metrics["concatenation_ratio"]),
            ]
    return rows


def measure(num_documents: int) -> list[dict[str, Any]]:
    """One dict per strategy and per peer that can take so many documents."""
    lengths = LAWS["fineweb_edu_like"](num_documents)
    # About half a second of calls: a call of milliseconds is disturbed more often than a long one.
    repeats = min(max(50_000_000 // num_documents, 2), 100)
    theirs = {}
    for name, prepare in PEERS.items():
        if num_documents <= LARGEST.get(name, 1 << 40):
            theirs[name] = in_child(partial(run_peer, prepare, lengths))
            print(f"{num_documents:,} documents: {name}", file=sys.stderr)
    rows = []
    for case in CASES:
        row = in_child(partial(run_case, case, lengths, repeats)) | asdict(case)
        if case.peer in theirs:
            row["times_faster"] = theirs[case.peer]["seconds"] / row["seconds"]
        rows.append(row)
        print(f"{num_documents:,} documents: {case.name}", file=sys.stderr)
    return rows + [{"name": name, **row} for name, row in theirs.items()]


def run_case(case: Case, lengths: Lengths, repeats: int) -> dict[str, Any]:
    buckets = BUCKETS if STRATEGIES[case.strategy].many_buckets else [CAPACITY]
    run = partial(pack, lengths, case.strategy, buckets=buckets, **case.parameters)
    index = run()  # also the peak: nothing before it took memory
    output = sum(array.nbytes for array in index.segment_arrays())
    least = -(-int(lengths.sum(dtype=np.int64)) // CAPACITY)
    excess = index.num_samples / least - 1 if len(buckets) == 1 else None
    del index
    return {
        "num_documents": len(lengths),
        "seconds": best_of(run, repeats),
        "seconds_2_threads": best_of(partial(run, threads=2), repeats),
        "output_bytes": output,
        "excess": excess,
    }


def run_peer(
    prepare: Callable[[Lengths, int], Callable[[], int | None]], lengths: Lengths
) -> dict[str, Any]:
    run = prepare(lengths, CAPACITY)
    seconds = best_of(run, 1 if len(lengths) > 100_000 else 2)
    samples = run() if len(lengths) <= 100_000 else None
    least = -(-int(lengths.sum(dtype=np.int64)) // CAPACITY)
    excess = None if samples is None else samples / least - 1
    return {"num_documents": len(lengths), "seconds": seconds, "excess": excess}


def report(size: int, rows: list[dict[str, Any]]) -> None:
    table = Table(
        f"{size:,} documents, {CAPACITY} tokens (buckets {BUCKETS})",
        ["", "ns/document", "target", "2 threads", "peak MB", "extra B/doc", "excess", "x faster"],
    )
    for row in rows:
        two = row.get("seconds_2_threads")
        extra = (row["peak_bytes"] - row["output_bytes"]) / size if "output_bytes" in row else None
        target = row.get("target") if size == 10_000_000 else None
        table.add(
            row["name"],
            f"{1e9 * row['seconds'] / size:,.2f}",
            "" if target is None else f"{target:g}",
            "" if two is None else f"{row['seconds'] / two:.2f} x",
            f"{row['peak_bytes'] / 1e6:,.0f}",
            "" if extra is None else f"{extra:.1f}",
            "" if row.get("excess") is None else f"{100 * row['excess']:.3f} %",
            f"{row['times_faster']:,.0f}" if "times_faster" in row else "",
        )
    table.print()


if __name__ == "__main__":
    main()
