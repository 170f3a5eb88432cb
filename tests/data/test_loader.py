"""Batches of a loader, prepared by a thread, by the caller, or by workers of torch."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from megapack.data import BucketBatchSampler, PackedDataset, Schedule, build_loader, resume
from megapack.data.batch import last_slot, wrapper
from megapack.data.loader import ThreadPrefetcher
from megapack.data.schedule import Step
from megapack.errors import ConfigError, FormatError, IndexMismatchError, ResumeError
from megapack.packing import pack
from tests.data.corpora import (
    STEP_TOKENS,
    assert_same_batches,
    of_rank,
    packed_lengths,
    random_documents,
    write_documents,
    write_labels,
    write_weights,
)
from tests.data.corpora import small_loader as loader
from tests.reference.gather import denominator_of, loss_mask_of

TENSORS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "sample_ids")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reuse_buffers": True, "read_ahead": 0},
        {"reuse_buffers": True, "prefetch": 0},
        {"prefetch": 4, "device": "cpu", "read_ahead": 1000},
    ],
)
@pytest.mark.parametrize(
    "layout", [{}, {"layout": "rows", "row_tokens": 64, "cu_seqlens": "padded"}]
)
def test_batches_do_not_depend_on_the_thread(
    packed: PackedDataset, options: dict[str, Any], layout: dict[str, Any]
) -> None:
    plain = list(loader(packed, prefetch=0, **layout))
    again = [copy.deepcopy(batch) for batch in loader(packed, **layout, **options)]
    assert_same_batches(plain, again)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "device is 'gpu', which torch does not know; give 'cuda' or 'cpu'"),
        ("cuda:99", r"device is 'cuda:99', and torch finds \d+ CUDA GPUs?; (leave out|set) device"),
    ],
)
def test_devices_that_do_not_exist_are_refused_at_once(
    packed: PackedDataset, device: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        loader(packed, device=device)


def test_arguments_of_other_loaders_are_explained(packed: PackedDataset) -> None:
    for name, message in (
        ("num_workers", "one thread prepares `prefetch` batches in"),
        ("shuffle", "order and seed belong to Schedule"),
    ):
        with pytest.raises(ConfigError, match=f"unknown argument '{name}'; {message}"):
            loader(packed, **{name: 2})


@pytest.mark.parametrize("index", [slice(0, 3), [0, 1], "0"], ids=str)
def test_samples_have_one_integer_each(packed: PackedDataset, index: Any) -> None:
    with pytest.raises(TypeError, match="give one integer at a time") as error:
        packed[index]
    samples = eval(str(error.value).partition("as in ")[2], {"dataset": packed})
    assert [len(sample["tokens"]) for sample in samples] == [16, 16, 16]


def test_a_batch_has_every_promised_key(packed: PackedDataset) -> None:
    batches = list(loader(packed, cu_seqlens="padded"))
    shapes = {(batch["capacity"], batch["cu_seqlens"].shape) for batch in batches}
    assert len(shapes) == len({batch["capacity"] for batch in batches}) == 3
    for batch in batches:
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert batch[name].shape == (1, 128)
        assert batch["cu_seqlens"][-1] == 128
        assert batch["max_seqlen"] == int(batch["cu_seqlens"].diff().max())
        for name in ("step", "micro_step", "num_micro_steps", "bucket", "capacity", "max_seqlen"):
            assert type(batch[name]) is int


def test_label_counts_are_right_for_chat_labels_and_bare_indices(tmp_path: Path) -> None:
    documents = random_documents(packed_lengths(100, 32, seed=3))
    dataset = write_documents(tmp_path / "d", documents)
    chosen = [[t if t % 2 else -100 for t in document] for document in documents]
    write_labels(tmp_path / "d", chosen)
    index = pack(dataset.document_lengths, "concat", buckets=[32])
    schedule = Schedule(index, tokens_per_step=128)
    for batch in loader(PackedDataset(dataset, index), size=1, schedule=schedule, num_steps=3):
        assert batch["num_step_label_tokens"] == batch["loss_mask"].sum() < 100


@pytest.mark.parametrize("row_tokens", [None, 100])
def test_padded_boundaries_fit_each_bucket(tmp_path: Path, row_tokens: int | None) -> None:
    """Every bucket has its own number of entries: each entry costs a block of an attention grid."""
    documents = random_documents([2] * 300 + [64] * 30)
    dataset = write_documents(tmp_path / "d", documents)
    index = pack(dataset.document_lengths, "bucket", buckets=[32, 64], promote="off")
    data = PackedDataset(dataset, index)
    tokens = 128 if row_tokens is None else 400
    schedule = Schedule(data, tokens_per_step=2 * tokens, row_tokens=row_tokens)
    entries: dict[int, int] = {}
    for batch in build_loader(data, schedule, **of_rank(micro=tokens, cu_seqlens="padded")):
        capacity, boundaries = batch["capacity"], batch["cu_seqlens"]
        assert entries.setdefault(capacity, len(boundaries)) == len(boundaries)
        assert batch["max_seqlen"] <= last_slot(capacity, batch["row_tokens"])
    slots = {32: 4, 64: 2} if row_tokens is None else {32: 12, 64: 4}
    most = {32: 32 // 2, 64: 1}
    assert entries == {c: slots[c] * (most[c] + 1) + 1 for c in (32, 64)}


@pytest.mark.parametrize("loss", ["token_mean", "sequence_mean", "longalign"])
def test_step_weights_sum_loss_masks_at_any_number_of_ranks(tmp_path: Path, loss: str) -> None:
    """One source has weights per token, some of them 0, and both sources have a factor."""
    documents = [random_documents(packed_lengths(100, 24, seed=s), s) for s in (3, 4)]
    weights = [
        [[t % 5 / 4 for t in d] for d in documents[0]],
        [[1.0] * len(d) for d in documents[1]],
    ]
    datasets = [write_documents(tmp_path / n, d) for n, d in zip("ab", documents, strict=True)]
    write_weights(tmp_path / "a", weights[0])
    indices = [pack(d.document_lengths, "bucket", buckets=[12, 24]) for d in datasets]
    data = PackedDataset(datasets, indices, weights=[1, 1], loss_weights=[0.3, 2], loss=loss)
    schedule = Schedule(data, tokens_per_step=256, row_tokens=32)
    options = {"schedule": schedule, "num_steps": 3, "row_tokens": 32}
    with pytest.raises(ConfigError, match="sources have loss weights"):
        loader(data, **options)
    seen = {}
    for size in (1, 2):
        masks: dict[int, list[float]] = {}
        for rank in range(size):
            for batch in loader(data, rank, size, weighted_loss=True, **options):
                masks.setdefault(batch["step"], []).extend(batch["loss_mask"].flatten().tolist())
                seen[size, batch["step"]] = batch["step_label_weight"]
        for step, of_step in masks.items():
            sequences, expected = sequences_of(data, schedule.step(step), weights, loss)
            wanted, unit = denominator_of(sequences, loss)
            assert seen[size, step] == pytest.approx(float(wanted), rel=1e-12)
            unscaled = sorted(value * float(unit) for value in expected)
            np.testing.assert_allclose(sorted(v for v in of_step if v), unscaled, rtol=1e-6)
            assert sum(of_step) == pytest.approx(seen[size, step], rel=1e-6)
    assert all(seen[1, step] == seen[2, step] for step in range(3))


def sequences_of(
    data: PackedDataset, content: Step, weights: list[list[list[float]]], loss: str
) -> tuple[list[tuple[float, list[float]]], list[float]]:
    """Return the sequences of a step, and the loss masks of labels without the step's unit."""
    sequences, masks = [], []
    for sample in content.sample_ids.tolist():
        source, segments = data.samples.segments(sample)
        factor = float(np.float32([0.3, 2][source]))
        for document, begin, length in segments:
            token_weights = weights[source][document][begin + 1 : begin + length + 1]
            token_weights = [float(np.float16(w)) for w in token_weights]
            sequences.append((factor, token_weights))
            masks += [value for value in loss_mask_of(token_weights, factor, loss) if value]
    return sequences, masks


def test_unused_token_weights_are_refused(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "d", random_documents([8, 8, 8]))
    write_weights(tmp_path / "d", [[2.0] * 8] * 3)
    index = pack(data.document_lengths, "bucket", buckets=[8])
    options: dict[str, Any] = {"micro_batch_tokens": 8, "size": 1, "num_steps": 1}
    none = {"token_weights": None}
    ways = [({}, r"weights per token \(column weights\), .* token_weights: none"), (none, None)]
    states = []
    for how, message in (*ways, ({**none, "loss": "longalign"}, "loss is longalign, and")):
        packed = PackedDataset(data, index, **how)
        schedule = Schedule(packed, tokens_per_step=24)
        states.append(schedule.state_dict(1))
        if message is not None:
            with pytest.raises(ConfigError, match=message):
                loader(packed, schedule=schedule, **options)
        assert len(loader(packed, schedule=schedule, weighted_loss=True, **options)) == 3
    assert states[1].keys().isdisjoint({"loss", "token_weights"})
    for one, other in ((0, 1), (1, 2), (2, 0)):
        with pytest.raises(ResumeError, match="would train differently on the samples"):
            resume.check_state(states[one], states[other])
        names = ("loss", "token_weights")
        [change, *_] = resume.check_state(states[one], states[other], allow_change=names)
        assert change.endswith("are weighted differently")


def test_a_schedule_of_another_index_is_refused(packed: PackedDataset) -> None:
    other = pack(packed_lengths(300, 64), "bucket", buckets=[32, 64])
    with pytest.raises(IndexMismatchError, match="make the schedule from the dataset"):
        loader(packed, schedule=Schedule(other, tokens_per_step=STEP_TOKENS))
    same = packed.samples.indices[0]
    assert len(loader(packed, schedule=Schedule(same, tokens_per_step=STEP_TOKENS)))


def test_options_that_contradict_each_other_are_refused(packed: PackedDataset) -> None:
    for options, message in (
        ({"device": "cpu", "reuse_buffers": True}, "may still read"),
        ({"row_tokens": 32}, "rows of 32 cannot hold samples of 64: make row_tokens a divisor"),
        ({"layout": "columns"}, "'stream' or 'rows'"),
        ({"prefetch": -1}, "loader: prefetch is -1; it must be at least 0"),
        ({"read_ahead": -1}, "loader: read_ahead is -1; it must be at least 0"),
        ({"check_ranks_every": -1}, "loader: check_ranks_every is -1; it must be at least 0"),
        ({"row_tokens": 0}, "row_tokens is 0; it must be above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            loader(packed, **options)


def test_batches_are_new_memory_unless_reused(packed: PackedDataset) -> None:
    batches = iter(loader(packed, prefetch=1, reuse_buffers=True))
    kept = [batch["tokens"] for batch in batches]
    assert len({tokens.data_ptr() for tokens in kept}) == 3 < len(kept)


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("megapack-prefetch")]


def test_abandoned_iteration_stops_its_thread(packed: PackedDataset) -> None:
    batches = iter(loader(packed))
    next(batches)
    assert _threads()
    del batches
    assert not _threads()
    assert len(list(loader(packed))) == len(loader(packed))
    assert not _threads()


def test_error_in_the_thread_replaces_its_batch(packed: PackedDataset) -> None:
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


def test_thread_stays_within_prefetch() -> None:
    produced = []

    def items() -> Iterator[int]:
        for i in range(100):
            produced.append(i)
            yield i

    ahead = ThreadPrefetcher(items(), 2)
    assert next(ahead) == 0
    ahead._thread.submit(int).result()  # returns when all requested items exist
    assert produced == [0, 1, 2, 3]  # one consumed, two waiting, one being made
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
    command, folder = [sys.executable, "-c", program, prefix], Path(__file__).parents[2]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_error_keeps_its_type_and_message(packed: PackedDataset) -> None:
    index = packed.samples.indices[0]
    lengths = np.full_like(index.segment_length, 10_000)
    damaged = PackedDataset(packed.datasets[0], replace(index, segment_length=lengths, path=None))
    with pytest.raises(FormatError, match="pack again"):
        list(loader(damaged, dealing="in_order"))


def _sampler(packed: PackedDataset, **options: Any) -> BucketBatchSampler:
    schedule = Schedule(packed, tokens_per_step=STEP_TOKENS, seed=2)
    return BucketBatchSampler(schedule, **of_rank(1, 2, **{"num_steps": 6, **options}))


def _stacked(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.stack([sample["tokens"] for sample in samples])


@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_workers", "start"), [(0, None), (2, "fork")])
def test_sampler_is_torchs(packed: PackedDataset, num_workers: int, start: str | None) -> None:
    own_loader = loader(packed, rank=1, layout="rows")
    workers = {"num_workers": num_workers, "multiprocessing_context": start}
    torch_loader = DataLoader(
        packed, batch_sampler=_sampler(packed), collate_fn=_stacked, **workers
    )
    assert len(torch_loader) == len(own_loader)
    for tokens, batch in zip(torch_loader, own_loader, strict=True):
        assert torch.equal(tokens, batch["tokens"])


def test_damaged_states_of_the_sampler_are_refused(packed: PackedDataset) -> None:
    micro_batches: Any = iter(_sampler(packed))
    state = micro_batches.state_dict()
    for damaged in ({**state, "micro_step": "x"}, {**state, "step": None}, {"step": 3}, None):
        with pytest.raises(ResumeError, match=r"the saved state of the sampler is damaged \("):
            micro_batches.load_state_dict(damaged)
    micro_batches.load_state_dict(state)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_workers", "consumed"), [(0, 0), (0, 3), (2, 1), (2, 8)])
def test_stateful_loader_continues(packed: PackedDataset, num_workers: int, consumed: int) -> None:
    def theirs() -> StatefulDataLoader[torch.Tensor]:
        return StatefulDataLoader(
            packed, batch_sampler=_sampler(packed), num_workers=num_workers, collate_fn=_stacked
        )

    whole, first, second = list(theirs()), theirs(), theirs()
    begun = iter(first)
    for _ in range(consumed):
        next(begun)
    second.load_state_dict(first.state_dict())
    resumed = list(second)
    assert len(resumed) == len(whole) - consumed
    for actual, expected in zip(resumed, whole[consumed:], strict=True):
        assert torch.equal(actual, expected)


def test_without_torch_a_batch_names_both_remedies(
    packed: PackedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # `import torch` fails as if it were missing
    wrapper.cache_clear()
    remedy = r"torch is not installed.*pip install torch\).*framework='numpy'"
    with pytest.raises(ModuleNotFoundError, match=remedy) as caught:
        next(iter(loader(packed)))
    assert caught.value.name == "torch"
