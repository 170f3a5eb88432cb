"""Threads and worker processes end when they should and fail loudly; other loaders fit, too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from megapack.data import BucketBatchSampler, PackedDataset, Schedule
from megapack.data.prefetch import ThreadPrefetcher
from megapack.errors import FormatError
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


class _Dies(PackedDataset):
    def micro_batch(self, sample_ids: Any, **options: Any) -> Any:
        if self.deadly in sample_ids:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        return super().micro_batch(sample_ids, **options)


@pytest.mark.multiprocess
def test_a_worker_that_is_killed_is_reported_with_its_signal(packed: PackedDataset) -> None:
    mortal = _Dies.__new__(_Dies)
    mortal.__dict__.update(packed.__dict__)
    batches = loader(mortal, num_workers=1, prefetch=1)
    mortal.deadly = int(list(batches.sampler)[4].sample_ids[0])
    with pytest.raises(
        RuntimeError, match=r"(?s)data worker failed.*signal: Killed.*out of memory"
    ):
        list(batches)


class _Sleeps(PackedDataset):
    def micro_batch(self, sample_ids: Any, **options: Any) -> Any:
        time.sleep(2)
        return super().micro_batch(sample_ids, **options)


@pytest.mark.multiprocess
def test_a_worker_that_hangs_is_an_error_after_the_given_time(packed: PackedDataset) -> None:
    silent = _Sleeps.__new__(_Sleeps)
    silent.__dict__.update(packed.__dict__)
    with pytest.raises(RuntimeError, match=r"before step 0.*timed out after 0\.3"):
        list(loader(silent, num_workers=1, timeout_seconds=0.3))


@pytest.mark.multiprocess
def test_an_error_in_a_worker_keeps_its_type_and_message(packed: PackedDataset) -> None:
    damaged = PackedDataset(packed.datasets[0], packed.samples.indices[0])
    index = damaged.samples.indices[0]
    lengths = index.segment_length.copy()
    lengths[:] = 10_000
    broken = loader(damaged, num_workers=1, dealing="in_order")
    damaged._gatherer = _gatherer_with(damaged, lengths)
    with pytest.raises(FormatError, match="pack again"):
        list(broken)


def _gatherer_with(packed: PackedDataset, lengths: Any) -> Any:
    from megapack import _core  # noqa: PLC0415

    dataset, index = packed.datasets[0], packed.samples.indices[0]
    gatherer = _core.Gatherer(**packed._options)
    gatherer.add_source(
        tokens=dataset.tokens,
        labels=None,
        index_bytes=dataset.index_bytes,
        index_name="broken.idx",
        sample_segment_offsets=index.sample_segment_offsets,
        segment_document=index.segment_document,
        segment_begin=index.segment_begin,
        segment_length=lengths,
    )
    return gatherer


@pytest.mark.multiprocess
def test_workers_end_with_the_iteration(packed: PackedDataset) -> None:
    before = set(_children())
    batches = iter(loader(packed, num_workers=2))
    next(batches)
    assert len(set(_children()) - before) == 2
    del batches
    assert not set(_children()) - before


def _children() -> list[int]:
    children = []
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            children += [int(pid) for pid in (task / "children").read_text().split()]
    return children


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
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_sampler_is_a_batch_sampler_of_torch(packed: PackedDataset, num_workers: int) -> None:
    ours = loader(packed, rank=1, layout="rows")
    theirs = DataLoader(
        packed, batch_sampler=_sampler(packed), num_workers=num_workers, collate_fn=_stacked
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
