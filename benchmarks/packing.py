"""``make bench-packing``: every packing strategy compared with its peers, on the same lengths.

Columns: nanoseconds per document, the same divided by one pass of numpy (``np.cumsum``; this ratio
depends less on the machine), peak memory, samples above the minimum, and speedup over the peer.
Strategy, peer and pass are warmed up and take turns in one process, on one core unless stated.
``make bench-composition`` measures the resulting samples.

Both sides of a row do the same work, named by ``what``: ``index only`` (documents of each sample;
no tokens are copied) or ``index and tokens`` (also writes every sample's tokens; megapack with
``PackedDataset`` from a file in the page cache). A peer is measured with each of its settings; the
speedup is over its fastest, whose padding is ``peer_excess_%``. Python peers pack 2,000 documents,
which favors them: with more documents their time per document grows, while megapack's falls.

Peers: megatron-core and TRL, as installed; axolotl's compiled packer (AXOLOTL=CHECKOUT; needs
numba), NeMo RL's modified first fit decreasing (NEMO_RL=CHECKOUT; Python), grain's best fit (needs
grain, array-record, etils, portpicker, cloudpickle, absl-py). Only a benchmark needs these:
``pip install --no-deps --target FOLDER numba llvmlite grain ...``, and FOLDER on PYTHONPATH. A
missing peer is reported and skipped. QUICK=1: up to a million documents, less than a minute.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from common import checkout_commit, in_child, peer_of, quick, show, take_turns, write_results
from lengths import LAWS, Lengths, write_documents

from megapack.data import BatchLayout, PackedDataset, allocate
from megapack.packing import STRATEGIES, pack

CAPACITY = 4096
BUCKETS = [1024, 2048, 4096]

# ---- Peers: each returns a function that packs and returns the number of samples, or None --------

# Megatron warns about missing packages that the sample index does not need.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")


class _PlannedError(Exception):
    """Raised when TRL starts to move tokens."""


def trl_plan(lengths: Lengths, capacity: int) -> Callable[[], None]:
    """Return TRL's best-fit decreasing over all documents at once.

    TRL's own function runs on lists of nulls. Its filter of empty documents is skipped, since there
    are none, and the function is stopped as soon as its plan is complete.
    """
    import pyarrow as pa  # noqa: PLC0415
    from trl import data_utils  # noqa: PLC0415

    assert lengths.min() > 0
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    column = pa.LargeListArray.from_arrays(offsets, pa.nulls(int(offsets[-1])))
    table = pa.table({"input_ids": column})

    take = data_utils.pc.take

    def stop(values: object, *arguments: object) -> object:
        if isinstance(values, pa.Table):
            raise _PlannedError
        return take(values, *arguments)

    def plan() -> None:
        calls = {"filter": lambda values, _: values, "take": stop}
        with patch.multiple(data_utils.pc, **calls), suppress(_PlannedError):
            data_utils._pack_bfd(table, capacity, "split")
            raise RuntimeError("trl now packs in another way: update this benchmark")

    return plan


def trl_pack_dataset(lengths: Lengths, capacity: int) -> Callable[[], int]:
    """Return TRL's public `pack_dataset`, with int32 tokens, in its batches of 1000."""
    import datasets  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415
    from trl import pack_dataset  # noqa: PLC0415

    datasets.disable_progress_bars()
    datasets.disable_caching()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = pa.array(np.zeros(int(offsets[-1]), np.int32))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})
    dataset = datasets.Dataset(table)
    return lambda: len(pack_dataset(dataset, capacity, strategy="bfd_split"))


def megatron_index(lengths: Lengths, capacity: int, *, shuffle: bool) -> Callable[[], int]:
    """Return the indexing of megatron-core's GPTDataset: document index, sample index."""
    from megatron.core.datasets import helpers  # noqa: PLC0415

    num_tokens = int(lengths.sum(dtype=np.int64))

    def build() -> int:
        documents = np.arange(len(lengths), dtype=np.int32)
        if shuffle:
            np.random.RandomState(1234).shuffle(documents)  # Megatron's default seed
        made = helpers.build_sample_idx(lengths, documents, capacity, 1, num_tokens, False, False)
        return len(made)

    return build


def pieces(lengths: Lengths, capacity: int) -> Lengths:
    """Cut documents at the capacity, untimed, for peers that do not split."""
    whole = np.full(int((lengths // capacity).sum()), capacity, np.int32)
    rest = lengths % capacity
    return np.concatenate([whole, rest[rest > 0]])


def axolotl(lengths: Lengths, capacity: int, *, group_size: int) -> Callable[[], int]:
    """Return axolotl's first fit over groups of documents, compiled by numba, in this process."""
    theirs = importlib.import_module("axolotl.utils.samplers.multipack")
    cut = pieces(lengths, capacity)
    how = {"bin_capacity": capacity, "group_size": group_size, "bin_size": 200, "num_processes": 1}
    return lambda: len(theirs.pack_parallel(cut, **how))


def nemo_rl(lengths: Lengths, capacity: int) -> Callable[[], int]:
    theirs = importlib.import_module("nemo_rl.data.packing.algorithms")
    packer = theirs.get_packer("modified_first_fit_decreasing", capacity)
    cut = pieces(lengths, capacity).tolist()
    return lambda: len(packer.pack(cut))


def grain(lengths: Lengths, capacity: int, *, bins: int, fit: str) -> Callable[[], int]:
    """Return a function that takes all samples of grain's iterator over documents in memory."""
    theirs = importlib.import_module("grain")
    packing = getattr(importlib.import_module("grain.experimental"), f"{fit}FitPackIterDataset")
    cut = pieces(lengths, capacity)
    documents = np.split(np.zeros(int(cut.sum()), np.int32), np.cumsum(cut)[:-1])

    def packed() -> int:
        rows = theirs.MapDataset.source(documents).map(lambda tokens: {"tokens": tokens})
        how = {"length_struct": {"tokens": capacity}, "num_packing_bins": bins}
        return sum(1 for _ in packing(rows.to_iter_dataset(), shuffle_bins=False, **how))

    return packed


@dataclass(frozen=True)
class Peer:
    """A peer's packer. ``settings``: name -> (lengths, capacity) -> the function to time."""

    settings: Mapping[str, Callable[[Lengths, int], Callable[[], int | None]]]
    most: int = 1 << 40  # most documents; more would take minutes, or gigabytes of tokens
    tokens: bool = False  # whether the peer also writes the samples' tokens
    variable: str = ""  # environment variable with the checkout; "" if the peer is installed
    folder: str = ""  # folder of the checkout to import from


PEERS = {
    "megatron index, file order": Peer({"": partial(megatron_index, shuffle=False)}),
    "megatron shuffle + index": Peer({"": partial(megatron_index, shuffle=True)}),
    "trl bfd_split, planning alone": Peer({"": trl_plan}, 1_000_000),
    "trl pack_dataset bfd_split": Peer({"": trl_pack_dataset}, 100_000, tokens=True),
    "axolotl": Peer(
        {f"groups of {n:,}": partial(axolotl, group_size=n) for n in (1_000, 10_000, 100_000)},
        *(100_000, False, "AXOLOTL", "src"),
    ),
    "NeMo RL MFFD": Peer({"": nemo_rl}, 2_000, False, "NEMO_RL"),
    "grain": Peer(
        {f"{fit.lower()} fit, {bins} bins": partial(grain, bins=bins, fit=fit)
         for fit, bins in (("First", 16), ("Best", 16), ("Best", 64))},
        *(2_000, True),
    ),
}  # fmt: skip


# ---- What is measured ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Strategy; ``goal``: most time at 1e7 documents, in numpy passes; ``peer``: key of PEERS."""

    name: str
    strategy: str
    parameters: dict[str, Any] = field(default_factory=dict)
    goal: float | None = None
    peer: str = ""


FFD, BFD = "first_fit_decreasing", "best_fit_decreasing"
CASES = [
    Case("concat, file order", "concat", {"shuffle": False}, 2, "megatron index, file order"),
    Case("concat, shuffled", "concat", {}, 8, "megatron shuffle + index"),
    Case(FFD, FFD, {}, 4, "axolotl"),
    Case(f"{FFD} (peer: NeMo RL)", FFD, {}, None, "NeMo RL MFFD"),
    Case(BFD, BFD, {}, 4, "trl bfd_split, planning alone"),
    Case(f"{BFD} (peer: all of trl)", BFD, {}, None, "trl pack_dataset bfd_split"),
    Case(f"{BFD} (peer: grain)", BFD, {}, None, "grain"),
    Case("seamless", "seamless", {}, 6),
    Case("bucket", "bucket", {}, 8),
    Case("bucket_v0", "bucket_v0", {}, 8),
    Case("bucket_llm", "bucket_llm", {}, 8),
    Case("bucket_llm, pools of 3000", "bucket_llm", {"preset": "paper"}),
    Case("bucket_llm, streamed", "bucket_llm", {"pool": "stream", "pool_size": 10_000}),
    *(Case(name, name) for name in ("bucket_naive", "next_fit", "length_sorted", "pad")),
    Case("decompose", "decompose"),
]


def main() -> None:
    sizes = [2_000, 100_000, 1_000_000] + ([] if quick() else [10_000_000])
    rows = [row for size in sizes for row in measure(size)]
    commits = {name: checkout_commit(of.variable) for name, of in PEERS.items() if of.variable}
    write_results("packing", {"strategies": rows, "peers": commits})
    for size in sizes:
        show(
            f"{size:,} documents, {CAPACITY} tokens (buckets {BUCKETS})",
            [row for row in rows if row["num_documents"] == size],
            *("name", "what", "ns_per_document", "spread_%", "over_cumsum", "goal", "2_threads"),
            *("peak_mb", "extra_bytes_per_document", "excess_%", "times_faster", "peer"),
            *("peer_excess_%",),
        )


def measure(num_documents: int) -> list[dict[str, Any]]:
    """Measure all strategies; return one row each."""
    lengths = LAWS["fineweb_edu_like"](num_documents)
    rows = []
    for case in CASES:
        memory = in_child(partial(memory_of, case, lengths))
        peak, output = memory["peak_bytes"], memory["output_bytes"]
        (found,) = in_child(lambda case=case: [times_of(case, lengths)])  # the child frees memory
        rows.append(
            {"name": case.name, "strategy": case.strategy, "num_documents": num_documents, **found}
            | {"peak_mb": peak / 1e6, "extra_bytes_per_document": (peak - output) / num_documents}
            | {"goal": case.goal if num_documents == 10_000_000 else None}
            | {"excess_%": memory["excess_%"]}
        )
        print(f"{num_documents:,} documents: {case.name}", file=sys.stderr)
    return rows


def call_of(case: Case, lengths: Lengths, **options: Any) -> Any:
    """Return the call that is measured."""
    buckets = BUCKETS if STRATEGIES[case.strategy].many_buckets else [CAPACITY]
    return partial(pack, lengths, case.strategy, buckets=buckets, **case.parameters, **options)


def memory_of(case: Case, lengths: Lengths) -> dict[str, Any]:
    """Measure the memory of one call in a fresh process."""
    index = call_of(case, lengths)()
    excess = index.num_samples / least(lengths) - 1
    one_bucket = not STRATEGIES[case.strategy].many_buckets
    return {
        "output_bytes": sum(array.nbytes for array in index.segment_arrays()),
        "excess_%": 100 * excess if one_bucket else None,
    }


def with_tokens(case: Case, lengths: Lengths, folder: Path) -> Callable[[], int]:
    """Return a function that packs, then gathers every sample into the same one-row buffer."""
    documents = write_documents(folder / "documents", lengths, vocabulary=50_000, dtype=np.int32)
    layout = BatchLayout(micro_batch_tokens=CAPACITY)
    out = allocate(CAPACITY)

    def packed() -> int:
        data = PackedDataset(documents, call_of(case, lengths)())
        for sample in range(len(data)):
            data.micro_batch([sample], layout=layout, capacity=CAPACITY, out=out)
        return len(data)

    return packed


def times_of(case: Case, lengths: Lengths) -> dict[str, Any]:
    """Time the strategy with one thread and two, a numpy pass, and the peer at its settings."""
    peer, theirs = PEERS.get(case.peer), {}
    if peer and len(lengths) <= peer.most:
        for setting, make in peer.settings.items():
            name = f"{case.peer}, {setting}".rstrip(", ")
            found = peer_of(name, partial(make, lengths, CAPACITY), peer.variable, peer.folder)
            theirs |= {name: found} if found else {}
    tokens = bool(theirs and peer and peer.tokens)
    sides: dict[str, Callable[[], Any]] = {"pass": partial(np.cumsum, lengths, dtype=np.int64)}
    with tempfile.TemporaryDirectory() as folder:
        if tokens:
            sides["ours"] = with_tokens(case, lengths, Path(folder))
        else:
            sides["ours"] = call_of(case, lengths)
            sides["2 threads"] = call_of(case, lengths, threads=2)
        times = take_turns({**sides, **theirs}, seconds=0.05)
    own = times["ours"]
    row = own.row() | {
        "what": "index and tokens" if tokens else "index only",
        "ns_per_document": 1e9 * own.seconds / len(lengths),
        "over_cumsum": own.seconds / times["pass"].seconds,
        "2_threads": None if tokens else own.seconds / times["2 threads"].seconds,
    }
    if not theirs:
        return row
    best = min(theirs, key=lambda name: times[name].seconds)
    samples = theirs[best]()
    return row | {
        "peer": best, "times_faster": times[best].seconds / own.seconds,
        "peer_seconds": times[best].seconds, "peer_spread_%": 100 * times[best].spread,
        "peer_excess_%": None if samples is None else 100 * (samples / least(lengths) - 1),
        "peer_settings": "; ".join(f"{name} {times[name].seconds:.4g} s" for name in theirs),
    }  # fmt: skip


def least(lengths: Lengths) -> int:
    """Return the smallest possible number of samples."""
    return -(-int(lengths.sum(dtype=np.int64)) // CAPACITY)


if __name__ == "__main__":
    main()
