"""The probe agrees with the model check on transformers' architectures: no false alarm, no miss.

The probe sees one batch, so it cannot find thresholds above its lengths (``THRESHOLD``).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention.test_architectures import IMPLEMENTATIONS, rows
from transformers import AutoConfig, AutoModelForCausalLM

from megapack.attention import register
from megapack.attention.model_check import isolated, tiny_reference
from megapack.attention.tiny_model import VOCABULARY, Row, randomize
from megapack.attention.transformers_interface import add_segment_numbers
from megapack.probe import probe

THRESHOLD = {"llama4_text"}
COMMON = "llama qwen3_moe gpt_neox opt mamba2"


def build(configuration: Any, attention: str) -> Any:
    return AutoModelForCausalLM.from_config(
        configuration, attn_implementation=attention, dtype=torch.float32
    )


def outcome(name: str, attention: str, how: str) -> Any:
    """Return the report on a row of three documents, in training mode."""
    torch._dynamo.reset()  # type: ignore[no-untyped-call]  # else old code uses up a limit
    register("eager" if name.startswith("gemma") else "sdpa")
    with isolated(torch.device("cpu")):
        tiny, _ = tiny_reference(AutoConfig.for_model(name), build)
        model = build(tiny, attention).train()
        randomize(model)
        add_segment_numbers(model)
        if how == "checkpoint":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model = model.bfloat16() if how == "bfloat16" else model
        model = torch.compile(model, backend="aot_eager") if how == "compile" else model
        documents = torch.split(torch.randint(0, VOCABULARY, (75,)), [37, 23, 15])
        return probe(model, Row.of(documents).arguments())


def check(name: str, how: str) -> int:
    """Compare with the guide, for all implementations that run."""
    compared = 0
    for attention, found in zip(IMPLEMENTATIONS, rows()[name], strict=True):
        if found in ("right", "documents meet") and not (name in THRESHOLD and found != "right"):
            report = outcome(name, attention, how)
            assert report.ok == (found == "right"), f"{name}, {attention}, {how}: {report}"
            assert report.ok or report.leaks[0].layer, f"{name}, {attention}, {how}: {report}"
            compared += 1
    return compared


@pytest.mark.parametrize("name", COMMON.split())
def test_common_architectures(name: str) -> None:
    assert check(name, "float32") > 0


@pytest.mark.pages
@pytest.mark.parametrize("how", ["float32", "bfloat16", "checkpoint", "compile"])
def test_all_architectures(how: str) -> None:
    assert sum(check(name, how) for name in rows()) >= 80
