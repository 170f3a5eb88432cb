"""The first training pass is probed, in a loop, in transformers' Trainer, and by a fixture."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megapack.errors import MegapackWarning
from megapack.probe import LeakCallback, LeakError, watch

from .bugs.parts import Attention, Decoder, causal, packed_batch

BATCH = packed_batch("cu_seqlens")


class Leaking(Attention):
    def visible(self, length: int, **given: Any) -> Tensor:
        return causal(length)


def one_step(model: nn.Module) -> list[Tensor]:
    """Return the gradients of a step, and the next random number."""
    logits = model(BATCH["input_ids"], cu_seqlens=BATCH["cu_seqlens"])
    (logits * torch.rand(logits.shape)).sum().backward()
    return [*(p.grad.clone() for p in model.parameters() if p.grad is not None), torch.rand(1)]


def test_a_watched_step_is_the_step_without_it() -> None:
    torch.manual_seed(3)
    plain = one_step(Decoder())
    torch.manual_seed(3)
    model = Decoder()
    with watch(model) as watched:
        found = one_step(model)
    assert watched.report is not None and watched.report.ok
    assert not model._forward_pre_hooks
    assert len(plain) == len(found) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_the_graph_of_the_gradients_is_freed() -> None:
    """Else a training step more stays in memory, and FSDP2 may free parameters in the next one."""
    states: list[Any] = []
    model = Decoder()
    model.norm.register_forward_hook(lambda *given: states.append(weakref.ref(given[-1])))
    watch(model)
    model(**BATCH)
    assert len(states) > 4 and not any(state() is not None for state in states)


def test_a_leak_stops_the_first_training_pass() -> None:
    model = Decoder(Leaking)
    watch(model)
    with torch.no_grad():
        model(**BATCH)  # an evaluation before training is not probed
    with pytest.raises(LeakError, match=r"layers\.1\.self_attn"):
        model(**BATCH)
    model(**BATCH)  # the second pass is not watched


def test_a_leak_can_be_a_warning() -> None:
    model = Decoder(Leaking)
    watched = watch(model, on_leak="warn")
    with pytest.warns(MegapackWarning, match="self_attn"):
        one_step(model)
    assert watched.report is not None and not watched.report.ok


def test_a_batch_that_cannot_be_probed_can_be_a_warning() -> None:
    model = Decoder(Leaking)
    watch(model, on_leak="warn")
    warns = pytest.warns(MegapackWarning, match="the batch has no boundaries")
    with warns, pytest.raises(KeyError, match="cu_seqlens"):  # of the model itself
        model(BATCH["input_ids"])


def test_a_model_that_takes_the_batch_is_watched() -> None:
    class Whole(Decoder):
        def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
            return super().forward(**batch)

    model = Whole(Leaking)
    watch(model)
    with pytest.raises(LeakError, match=r"layers\.1\.self_attn"):
        model(BATCH)


@pytest.mark.parametrize("first", ["watch", "compile"])
def test_a_compiled_model_is_watched(first: str) -> None:
    model = Decoder(Leaking)
    if first == "compile":
        model.compile(backend="eager")
    watch(model)
    if first == "watch":
        model.compile(backend="eager")
    with pytest.raises(LeakError, match=r"layers\.1\.self_attn"):
        model(**BATCH)


def test_a_block_without_a_training_pass_warns() -> None:
    @watch(Decoder())
    def forgets() -> None:
        """Trains another model."""

    with pytest.warns(MegapackWarning, match="no forward pass in training mode"):
        forgets()


class FusedLoss(nn.Module):
    """Returns a loss and no logits, like a fused head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.decoder = Decoder(kind)

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> SimpleNamespace:
        logits = self.decoder(input_ids=input_ids, cu_seqlens=cu_seqlens)
        return SimpleNamespace(loss=logits.logsumexp(-1).mean())


def test_without_logits_the_decoder_is_probed() -> None:
    right, wrong = FusedLoss(Attention), FusedLoss(Leaking)
    watched = watch(right)
    right(**BATCH)
    assert watched.report is not None and watched.report.ok
    watch(wrong)
    with pytest.raises(LeakError, match=r"layers\.1\.self_attn"):
        wrong(**BATCH)


@pytest.mark.parametrize("leaking", [False, True])
def test_a_trainer_of_transformers_is_stopped_by_a_leak(leaking: bool, tmp_path: Path) -> None:
    from transformers import (  # noqa: PLC0415  # slow to import
        DataCollatorWithFlattening,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainingArguments,
    )

    class WithOnes(DataCollatorWithFlattening):
        """Adds the mask that makes transformers ignore positions."""

        def __call__(self, features: Any, **more: Any) -> Any:
            batch = super().__call__(features, **more)
            return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    documents = [{"input_ids": list(range(3, 3 + n))} for n in (14, 9, 17, 12)]
    callback = LeakCallback()
    trainer = Trainer(
        model=LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="sdpa")),
        args=TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no",
        ),
        train_dataset=documents,
        data_collator=(WithOnes if leaking else DataCollatorWithFlattening)(),
        callbacks=[callback],
    )  # fmt: skip
    if leaking:
        with pytest.raises(LeakError, match=r"model\.layers\.0\.self_attn"):
            trainer.train()
        assert trainer.state.global_step == 0
    else:
        trainer.train()
        assert callback.report is not None and callback.report.ok
        assert trainer.state.global_step == 2


def test_the_fixture_fails_a_test_with_the_report(tmp_path: Path) -> None:
    (tmp_path / "test_packing.py").write_text(
        "from probe.bugs.parts import Decoder, packed_batch\n"
        "from probe.test_watch import Leaking\n"
        "def test_right(no_leaks):\n"
        "    assert no_leaks(Decoder(), packed_batch('cu_seqlens')).forwards <= 5\n"
        "def test_wrong(no_leaks):\n"
        "    no_leaks(Decoder(Leaking), packed_batch('cu_seqlens'))\n"
    )
    paths = [str(Path(__file__).parents[n]) for n in (1, 2)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "megapack.pytest_plugin", str(tmp_path)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": ":".join(paths)},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "first in layers.1.self_attn" in ran.stdout
