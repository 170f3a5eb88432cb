"""No model of transformers trains differently in a row than alone without being refused.

For each architecture of transformers, each RoPE type, and documents on both sides of the type's
position threshold: what ``check_architecture`` accepts must equal the documents run alone.
Two combinations run in the gate, all of them (more than an hour) in ``make test-all``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megapack.attention import check_architecture, register
from megapack.attention.tiny_model import (
    VOCABULARY,
    Row,
    plain_arguments,
    randomize,
    tiny_configuration,
)
from megapack.attention.transformers_interface import add_segment_numbers
from megapack.errors import ConfigError

THRESHOLD, LONGEST_POSITION = 64, 256
ROPE_TYPES = ["default", *sorted({*ROPE_INIT_FUNCTIONS} - {"default"})]
LENGTHS = ([50, 20], [100, 20, 40])  # below the threshold; on both sides of it
IN_GATE = {("llama", "dynamic"), ("moshi", "dynamic")}
ALL = [
    pytest.param(name, kind, marks=[] if (name, kind) in IN_GATE else pytest.mark.pages)
    for name in sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})
    for kind in ROPE_TYPES
]


def build(configuration: Any, attention: str) -> Any:
    return AutoModelForCausalLM.from_config(
        configuration, attn_implementation=attention, dtype=torch.float32
    )


def rope_parameters(kind: str, old: dict[str, Any], width: int) -> dict[str, Any]:
    """Return the parameters of a RoPE type whose threshold, if it has one, is 64 positions."""
    new = {"rope_theta": 10000.0, "rope_type": kind}
    new |= {
        key: old[key] for key in ("rope_theta", "partial_rotary_factor") if old.get(key) is not None
    }
    new["factor"] = 4.0
    if kind in ("yarn", "llama3", "longrope"):
        new["original_max_position_embeddings"] = THRESHOLD
    if kind == "llama3":
        new |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        new["short_factor"] = [1.0] * width
        new["long_factor"] = [1.0 + 3 * i / width for i in range(width)]
    return new


def configuration_of(name: str, kind: str) -> Any:
    """Return the text configuration of an architecture with a RoPE type.

    Raises:
        Exception: transformers refuses the combination.
    """
    text = AutoConfig.for_model(name).get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None)
    if kind == "default":
        return text
    if rope is None:
        raise ValueError("no RoPE")
    head_dim = (
        getattr(text, "qk_rope_head_dim", None)
        or getattr(text, "head_dim", None)
        or text.hidden_size // text.num_attention_heads
    )

    def changed(old: dict[str, Any]) -> dict[str, Any]:
        share = old.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None)
        return rope_parameters(kind, old, int(head_dim * (share or 1.0)) // 2)

    fields = text.to_dict()
    fields.pop("dtype", None)
    per_layer_type = rope and all(isinstance(value, dict) for value in rope.values())
    fields["rope_parameters"] = (
        {key: changed(value) for key, value in rope.items()} if per_layer_type else changed(rope)
    )
    fields["max_position_embeddings"] = THRESHOLD if kind == "dynamic" else LONGEST_POSITION
    if "original_max_position_embeddings" in fields:
        fields["original_max_position_embeddings"] = THRESHOLD
    return type(text).from_dict(fields)


def accepted(configuration: Any, longest: int) -> bool:
    try:
        check_architecture(
            configuration,
            attention="megapack",
            build=build,
            device=torch.device("cpu"),
            longest=longest,
        )
    except ConfigError:
        return False
    return True


def error_of_row(configuration: Any, lengths: list[int]) -> float:
    """Return the largest difference of logits, row against documents alone under ``eager``.

    In units of the logits' standard deviation.
    """
    try:
        tiny = tiny_configuration(configuration)
        reference = build(tiny, "eager")
        reference(**plain_arguments(torch.arange(4)))
    except Exception:  # sizes that rely on each other
        tiny = tiny_configuration(configuration, exact=True)
        reference = build(tiny, "eager")
    randomize(reference)
    model = build(tiny, "megapack").train()
    model.load_state_dict(reference.train().state_dict())
    add_segment_numbers(model)
    generator = torch.Generator().manual_seed(5)
    documents = [torch.randint(0, VOCABULARY - 8, (n,), generator=generator) for n in lengths]
    with torch.no_grad():
        row = model(**Row.of(documents).arguments()).logits[0]
        alone = torch.cat([reference(**plain_arguments(tokens)).logits[0] for tokens in documents])
    return float((row - alone).abs().max() / alone.std())


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_accepted_models_compute_the_same_in_a_row_as_alone(name: str, kind: str) -> None:
    torch.set_num_threads(1)
    register("eager")
    try:
        configuration = configuration_of(name, kind)
    except Exception as error:
        pytest.skip(f"transformers has no such model: {error}")
    for lengths in LENGTHS:
        if accepted(configuration, max(lengths)):
            difference = error_of_row(configuration, lengths)
            assert difference < 1e-3, f"{name}, RoPE {kind}, documents of {lengths}: {difference}"


def test_the_threshold_separates_what_is_accepted() -> None:
    configuration = configuration_of("llama", "dynamic")
    register("eager")
    assert [accepted(configuration, max(lengths)) for lengths in LENGTHS] == [True, False]
