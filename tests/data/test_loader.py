"""build_loader gives the same batches whoever prepares them, and fails loudly and cleanly."""

from __future__ import annotations

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

from megapack.data import BatchLayout, BucketBatchSampler, PackedDataset, Schedule, build_loader
from megapack.data.loader import PackedLoader
from megapack.data.prefetch import ThreadPrefetcher
from megapack.errors import ConfigError, FormatError, IndexMismatchError
from megapack.packing import pack
from tests.data.corpora import packed_lengths, random_documents, write_documents

STEP = 64 * 8
TENSORS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "sample_ids")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedDataset:
    folder = tmp_path_factory.mktemp("loader")
    dataset = write_documents(folder / "d", random_documents(packed_lengths(300, 64)))
    index = pack(dataset.document_lengths, "bucket", buckets=[16, 32, 64])
    index.save(folder / "d.samples", source=dataset)
    return PackedDataset(folder / "d", folder / "d.samples")


def loader(packed: PackedDataset, rank: int = 0, size: int = 2, **options: Any) -> PackedLoader:
    schedule = options.pop("schedule", None) or Schedule(packed, tokens_per_step=STEP, seed=2)
    arguments: dict[str, Any] = {"micro_batch_tokens": 128, "num_steps": 6, **options}
    return build_loader(
        packed, schedule, data_parallel_rank=rank, data_parallel_size=size, **arguments
    )


def copied(batches: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        for batch in batches
    ]


def assert_same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    assert len(a) == len(b) > 0
    for left, right in zip(a, b, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == right[name].dtype and torch.equal(value, right[name]), name
            else:
                assert value == right[name] and type(value) is type(right[name]), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reuse_buffers": True},
        {"reuse_buffers": True, "prefetch": 0},
        pytest.param({"num_workers": 1}, marks=pytest.mark.multiprocess),
        pytest.param({"num_workers": 2, "prefetch": 4}, marks=pytest.mark.multiprocess),
        {"device": "cpu"},
    ],
)
@pytest.mark.parametrize(
    "layout", [{}, {"layout": "rows", "row_tokens": 64, "cu_seqlens": "padded"}]
)
def test_batches_do_not_depend_on_who_prepares_them(
    packed: PackedDataset, options: dict[str, Any], layout: dict[str, Any]
) -> None:
    plain = list(loader(packed, prefetch=0, **layout))
    assert_same(plain, copied(iter(loader(packed, **layout, **options))))


def test_a_batch_has_every_promised_key(packed: PackedDataset) -> None:
    batches = list(loader(packed, cu_seqlens="padded"))
    assert len({batch["cu_seqlens"].shape for batch in batches}) == 1
    for batch in batches:
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert batch[name].shape == (1, 128)
        assert batch["cu_seqlens"][-1] == 128
        assert batch["max_seqlen"] == int(batch["cu_seqlens"].diff().max())
        for name in ("step", "micro_step", "num_micro_steps", "bucket", "capacity", "max_seqlen"):
            assert type(batch[name]) is int


def test_label_tokens_of_a_step_are_what_its_ranks_have_together(packed: PackedDataset) -> None:
    schedule = Schedule(packed, tokens_per_step=STEP, seed=2)
    found: dict[int, float] = {}
    announced: dict[int, int] = {}
    for rank in range(2):
        for batch in loader(packed, rank, schedule=schedule):
            found[batch["step"]] = found.get(batch["step"], 0) + float(batch["loss_mask"].sum())
            announced[batch["step"]] = batch["num_step_label_tokens"]
    assert found == announced
    assert announced[3] == schedule.step(3).num_label_tokens


def test_label_counts_are_right_for_chat_labels_and_bare_indices(tmp_path: Path) -> None:
    documents = random_documents(packed_lengths(100, 32, seed=3))
    dataset = write_documents(tmp_path / "d", documents)
    chosen = [[t if t % 2 else -100 for t in document] for document in documents]
    write_documents(tmp_path / "d.labels", chosen, "int32")
    index = pack(dataset.document_lengths, "concat", buckets=[32])
    batches = list(
        loader(
            PackedDataset(dataset, index),
            size=1,
            schedule=Schedule(index, tokens_per_step=128),
            num_steps=3,
        )
    )
    for batch in batches:
        assert batch["num_step_label_tokens"] == batch["loss_mask"].sum() < 100


def test_a_schedule_of_another_index_is_refused(packed: PackedDataset) -> None:
    other = pack(packed_lengths(300, 64), "bucket", buckets=[32, 64])
    with pytest.raises(IndexMismatchError, match="make the schedule from the dataset"):
        loader(packed, schedule=Schedule(other, tokens_per_step=STEP))
    same = packed.samples.indices[0]
    assert len(loader(packed, schedule=Schedule(same, tokens_per_step=STEP)))


def test_options_that_contradict_each_other_are_refused(packed: PackedDataset) -> None:
    with pytest.raises(ConfigError, match="num_workers=0"):
        loader(packed, num_workers=1, reuse_buffers=True)
    with pytest.raises(ConfigError, match="still be reading"):
        loader(packed, device="cpu", reuse_buffers=True)
    with pytest.raises(ConfigError, match="row_tokens"):
        loader(packed, row_tokens=32)
    with pytest.raises(ConfigError, match="'stream' or 'rows'"):
        loader(packed, layout="columns")


# --- threads ---------------------------------------------------------------------------------


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
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program, prefix],
            check=False,
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert (done.returncode, done.stderr) == (0, "")


# --- worker processes ------------------------------------------------------------------------


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
        time.sleep(60)
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
        children += [int(pid) for pid in (task / "children").read_text().split()]
    return children


# --- other people's loaders ------------------------------------------------------------------


def _sampler(packed: PackedDataset, **options: Any) -> BucketBatchSampler:
    return BucketBatchSampler(
        Schedule(packed, tokens_per_step=STEP, seed=2),
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_arrive_on_the_device_unchanged(packed: PackedDataset, num_workers: int) -> None:
    plain = list(loader(packed))
    moved = list(loader(packed, device="cuda", pin_memory=True, num_workers=num_workers))
    for a, b in zip(plain, moved, strict=True):
        for name in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens"):
            assert b[name].is_cuda and torch.equal(a[name], b[name].cpu())


def test_every_rank_row_and_layout_holds_the_same_tokens(packed: PackedDataset) -> None:
    """Rows, streams and constant rows are three shapes of one thing."""
    stream = list(loader(packed))
    for options in ({"layout": "rows"}, {"layout": "rows", "row_tokens": 128}):
        for a, b in zip(stream, loader(packed, **options), strict=True):
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                assert torch.equal(a[name].flatten(), b[name].flatten())
            assert torch.equal(a["cu_seqlens"], b["cu_seqlens"])
    assert BatchLayout(micro_batch_tokens=128, kind="rows").shape(32) == (4, 32)
