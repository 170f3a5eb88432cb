"""Threads and worker processes end when they should and fail loudly; other loaders fit, too."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from megapack.data import BucketBatchSampler, PackedDataset, Schedule
from megapack.data.loader import ThreadPrefetcher
from megapack.errors import FormatError
from megapack.packing import SampleIndex
from tests.data.corpora import STEP_TOKENS
from tests.data.corpora import small_loader as loader


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "megapack-prefetch"]


def test_an_abandoned_iteration_leaves_no_thread(packed: PackedDataset) -> None:
    batches = iter(loader(packed))
    next(batches)
    assert _threads()
    del batches
    assert not _threads()
    assert len(list(loader(packed))) == len(loader(packed))
    assert not _threads()


def test_an_error_in_the_thread_is_raised_at_its_place(packed: PackedDataset) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise FormatError("sample 7 is damaged")

    ahead = ThreadPrefetcher(items(), 3)
    assert next(ahead) == 1
    with pytest.raises(FormatError, match="sample 7"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    assert not _threads()


def test_a_thread_never_runs_further_ahead_than_asked() -> None:
    produced = []

    def items() -> Iterator[int]:
        for i in range(100):
            produced.append(i)
            yield i

    ahead = ThreadPrefetcher(items(), 2)
    assert next(ahead) == 0
    for _ in range(50):
        threading.Event().wait(0.001)
    assert len(produced) <= 4  # one handed over, two waiting, one in hand
    ahead.close()
    assert not _threads()


def test_a_program_that_ends_amid_an_iteration_ends_cleanly(packed: PackedDataset) -> None:
    program = (
        "import logging, sys\n"
        "logging.disable()\n"
        "from megapack.data import PackedDataset, Schedule, build_loader\n"
        "packed = PackedDataset(sys.argv[1], sys.argv[1] + '.samples')\n"
        "schedule = Schedule(packed, tokens_per_step=64 * 512)\n"
        "batches = iter(build_loader(packed, schedule, data_parallel_rank=0,\n"
        "    data_parallel_size=1, micro_batch_tokens=64 * 512, num_steps=100000))\n"
        "print(next(batches)['tokens'].shape)\n"
    )
    prefix = packed.datasets[0].prefix
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program, prefix],
            check=False,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_workers", [None, 0, 1])
def test_an_error_keeps_its_type_and_message(
    packed: PackedDataset, num_workers: int | None
) -> None:
    """In the loader's thread, and in torch's DataLoader with worker processes or without."""
    index = packed.samples.indices[0]
    assert isinstance(index, SampleIndex)
    lengths = np.full_like(index.segment_length, 10_000)
    damaged = PackedDataset(packed.datasets[0], replace(index, segment_length=lengths, path=None))
    batches: Iterable[Any] = loader(damaged, dealing="in_order")
    if num_workers is not None:
        batches = DataLoader(
            damaged, batch_sampler=_sampler(packed), num_workers=num_workers, collate_fn=_stacked
        )
    with pytest.raises(FormatError, match="pack again"):
        list(batches)


def _sampler(packed: PackedDataset, **options: Any) -> BucketBatchSampler:
    return BucketBatchSampler(
        Schedule(packed, tokens_per_step=STEP_TOKENS, seed=2),
        data_parallel_rank=1,
        data_parallel_size=2,
        micro_batch_tokens=128,
        **{"num_steps": 6, **options},
    )


def _stacked(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([sample["tokens"] for sample in samples])


@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_workers", "start"), [(0, None), (2, "fork"), (1, "spawn")])
def test_the_sampler_is_a_batch_sampler_of_torch(
    packed: PackedDataset, num_workers: int, start: str | None
) -> None:
    ours = loader(packed, rank=1, layout="rows")
    theirs = DataLoader(
        packed,
        batch_sampler=_sampler(packed),
        num_workers=num_workers,
        collate_fn=_stacked,
        multiprocessing_context=start,
    )
    assert len(theirs) == len(ours)
    for tokens, batch in zip(theirs, ours, strict=True):
        assert torch.equal(tokens, batch["tokens"])


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("consumed", [0, 1, 3, 8])
def test_torchdatas_stateful_loader_continues_exactly(
    packed: PackedDataset, num_workers: int, consumed: int
) -> None:
    def theirs() -> StatefulDataLoader[torch.Tensor]:
        return StatefulDataLoader(
            packed, batch_sampler=_sampler(packed), num_workers=num_workers, collate_fn=_stacked
        )

    whole = list(theirs())
    first = theirs()
    begun = iter(first)
    for _ in range(consumed):
        next(begun)
    state = first.state_dict()
    second = theirs()
    second.load_state_dict(state)
    rest = list(second)
    assert len(rest) == len(whole) - consumed
    for left, right in zip(rest, whole[consumed:], strict=True):
        assert torch.equal(left, right)
