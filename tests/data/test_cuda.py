"""Batches copied to a CUDA device ahead of time equal those of the CPU, also on a busy device."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from megapack.data import PackedDataset, Schedule
from megapack.integrations.dialects import MEGATRON, OLMO_CORE, TRANSFORMERS, emit, loss_terms
from tests.data.corpora import STEP_TOKENS
from tests.data.corpora import small_loader as loader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TENSORS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
WAYS = [
    {"pin_memory": True},
    {"pin_memory": True, "prefetch": 0},
    {"pin_memory": False},
    pytest.param({"pin_memory": True, "num_workers": 2}, marks=pytest.mark.multiprocess),
]


@pytest.mark.parametrize("way", WAYS)
def test_values_equal_those_of_the_cpu_on_a_busy_device(
    packed: PackedDataset, way: dict[str, Any]
) -> None:
    """The device is many batches behind the host, so that buffers overwritten or freed too early
    would show."""
    schedule = Schedule(packed, tokens_per_step=STEP_TOKENS, seed=2)
    run = {"schedule": schedule, "num_steps": 150, "cu_seqlens": "padded"}
    plain = list(loader(packed, **run))
    assert len(plain) == 300
    heavy = torch.randn(2048, 2048, device="cuda")
    seen: list[dict[str, torch.Tensor]] = []
    for batch in loader(packed, device="cuda", **run, **way):
        assert all(batch[name].is_cuda for name in TENSORS)
        assert type(batch["max_seqlen"]) is int and not batch["sample_ids"].is_cuda
        heavy = torch.nn.functional.normalize(heavy @ heavy)
        seen.append({name: batch[name].clone() for name in TENSORS})  # queued after the product
        torch.empty_like(batch["tokens"]).fill_(-1)  # would reuse memory that was freed too early
        del batch
    assert len(seen) == len(plain)
    for expected, got in zip(plain, seen, strict=True):
        for name in TENSORS:
            assert got[name].dtype == expected[name].dtype
            assert torch.equal(got[name].cpu(), expected[name]), name


def test_loader_frees_everything_after_an_early_exit(packed: PackedDataset) -> None:
    def take_three() -> None:
        batches = iter(loader(packed, device="cuda", pin_memory=True))
        for _ in range(3):
            next(batches)
        batches.close()  # type: ignore[attr-defined]

    take_three()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        take_three()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert not [t for t in threading.enumerate() if t.name == "megapack-prefetch"]


def test_batches_on_a_device_are_converted_like_those_of_the_cpu(packed: PackedDataset) -> None:
    of_cpu, of_device = (list(loader(packed, num_steps=2, device=d)) for d in (None, "cuda"))
    for dialect in (TRANSFORMERS, MEGATRON, OLMO_CORE):
        for here, there in zip(of_cpu, of_device, strict=True):
            wanted = emit(here, dialect)
            for name, value in emit(there, dialect).items():
                is_tensor = isinstance(value, torch.Tensor)
                assert not is_tensor or value.is_cuda, name
                same = (
                    torch.equal(value.cpu(), wanted[name]) if is_tensor else value == wanted[name]
                )
                assert same, name
            terms = zip(loss_terms(here, dialect), loss_terms(there, dialect), strict=True)
            assert all(there.is_cuda and torch.equal(there.cpu(), here) for here, there in terms)
