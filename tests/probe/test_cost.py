"""Cost of a probe: forward passes of the batch, and its largest tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.harness import run_forked
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from megapack.probe import probe

from .modules import Attention, Edge, Model, batch_of

IDS, LENGTHS = 129_000, [25, 16, 23]


class Language(Model):
    """A model that names its head, as those of transformers do."""

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


class Largest(TorchDispatchMode):
    """Finds the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [value.numel() for value in tree_leaves(made) if isinstance(value, Tensor)]
        self.numel = max([self.numel, *sizes])
        return made


@contextmanager
def counted(model: nn.Module, row: int) -> Iterator[list[int]]:
    """Count the forward passes of rows of this length."""
    calls: list[int] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        del module, args
        if kwargs["input_ids"].shape[1] == row:
            calls.append(row)

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    yield calls
    hook.remove()


@pytest.mark.parametrize("layer", [Attention(), Edge(0, 2), Edge(2, 1)])
def test_five_passes_of_few_logits_suffice(layer: nn.Module) -> None:
    """The vocabulary has 129,000 ids; the model leaks or does not."""
    model, batch = Language(layer, ids=IDS), batch_of(LENGTHS, ids=IDS)
    with counted(model, sum(LENGTHS)) as calls, Largest() as largest:
        report = probe(model, batch)
    assert report.ok == isinstance(layer, Attention)
    assert len(calls) == report.forwards <= 5
    assert largest.numel == sum(LENGTHS) * 256
    with Largest() as largest:
        model(**batch)
    assert largest.numel == sum(LENGTHS) * IDS


def status(key: str) -> int:
    """Return a number of kilobytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def growth(what: str) -> int:
    """Return by how many kilobytes the memory of this process grows at most."""
    torch.set_num_threads(1)
    config = AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=512, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=8_000,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    ids, positions = torch.randint(3, 8_000, (1, 1024)), torch.arange(128).repeat(8)[None]
    batch = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    if what == "probe":
        assert probe(model, batch).ok
    else:
        model(**batch, labels=ids).loss.backward()
    return status("VmHWM") - before


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
def test_memory_stays_below_that_of_a_training_step() -> None:
    peak = {what: run_forked(growth, what) for what in ("probe", "step")}
    assert 0 < peak["probe"] < peak["step"], peak
