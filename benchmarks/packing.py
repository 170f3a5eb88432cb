"""make bench-packing: every packing strategy beside its rivals, on the same lengths.

Nanoseconds per document, the same over what numpy takes for one pass (``np.cumsum``, which depends
less on the machine), peak memory, samples over the least possible, and times faster than the peer.
Strategy, peer and pass are warmed and take turns in one process. One core unless said; index arrays
in memory. What the strategies make of the documents: ``make bench-composition``.

QUICK=1: up to a million documents, less than a minute. LARGE=1: up to 1e8.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from common import in_child, large, quick, show, take_turns, write_results
from lengths import LAWS
from numpy.typing import NDArray

from megapack.packing import STRATEGIES, pack

CAPACITY = 4096
BUCKETS = [1024, 2048, 4096]
FILE_ORDER, SHUFFLED = "megatron index, file order", "megatron shuffle + index"
TRL_PLAN, TRL_WHOLE = "trl bfd_split, planning alone", "trl pack_dataset bfd_split"
# Beyond so many documents a peer takes minutes, or its tokens gigabytes.
LARGEST = {TRL_PLAN: 1_000_000, TRL_WHOLE: 100_000}

Lengths = NDArray[np.int32]


# ---- Other people's packers, as installed: each gives the samples it makes, or None -------------

# Whatever Megatron would like to have beside it: the sample index needs none of it.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")


class _PlannedError(Exception):
    """Raised where TRL would begin to move tokens."""


def trl_plan(lengths: Lengths, capacity: int) -> Callable[[], None]:
    """TRL's best-fit decreasing over all documents at once, up to where it moves the tokens.

    Its own function runs on lists of nulls. What it does to tokens before it plans (it filters out
    empty documents; there are none) is skipped, and it is stopped when the plan is made.
    """
    import pyarrow as pa  # noqa: PLC0415
    from trl import data_utils  # noqa: PLC0415

    assert lengths.min() > 0
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    column = pa.LargeListArray.from_arrays(offsets, pa.nulls(int(offsets[-1])))
    table = pa.table({"input_ids": column})

    take = data_utils.pc.take

    def stop(values: object, *arguments: object) -> object:
        if isinstance(values, pa.Table):
            raise _PlannedError
        return take(values, *arguments)

    def plan() -> None:
        with (
            patch.object(data_utils.pc, "filter", lambda values, _: values),
            patch.object(data_utils.pc, "take", stop),
        ):
            try:
                data_utils._pack_bfd(table, capacity, "split")
            except _PlannedError:
                return
            raise RuntimeError("trl packs in another way now; this benchmark must follow")

    return plan


def trl_pack_dataset(lengths: Lengths, capacity: int) -> Callable[[], int]:
    """TRL as its users call it: `pack_dataset`, with int32 tokens, in its batches of 1000."""
    import datasets  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415
    from trl import pack_dataset  # noqa: PLC0415

    datasets.disable_progress_bars()
    datasets.disable_caching()
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    tokens = pa.array(np.zeros(int(offsets[-1]), np.int32))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})
    dataset = datasets.Dataset(table)
    return lambda: len(pack_dataset(dataset, capacity, strategy="bfd_split"))


def megatron_index(lengths: Lengths, capacity: int, *, shuffle: bool) -> Callable[[], int]:
    """Megatron-core's GPTDataset: document index (shuffled with numpy), sample index."""
    from megatron.core.datasets import helpers  # noqa: PLC0415

    num_tokens = int(lengths.sum(dtype=np.int64))

    def build() -> int:
        documents = np.arange(len(lengths), dtype=np.int32)
        if shuffle:
            np.random.RandomState(1234).shuffle(documents)  # Megatron's default seed
        made = helpers.build_sample_idx(lengths, documents, capacity, 1, num_tokens, False, False)
        return len(made)

    return build


PEERS: dict[str, Callable[[Lengths, int], Callable[[], int | None]]] = {
    FILE_ORDER: partial(megatron_index, shuffle=False),
    SHUFFLED: partial(megatron_index, shuffle=True),
    TRL_PLAN: trl_plan,
    TRL_WHOLE: trl_pack_dataset,
}


# ---- What is measured ---------------------------------------------------------------------------


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
