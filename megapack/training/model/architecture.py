"""Which model: its transformers configuration, and what that asks of attention."""

from __future__ import annotations

from typing import Any

import torch

from megapack.attention import AttentionNeeds, alibi_slopes
from megapack.errors import ConfigError
from megapack.training.config import ModelConfig
from megapack.training.model.presets import PRESETS

__all__ = [
    "attention_needs",
    "model_configuration",
    "register_architectures",
]

_DROPOUTS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")


def model_configuration(config: ModelConfig, vocab_size: int) -> Any:
    """The transformers configuration of a run.

    Args:
        config: preset or checkpoint, and overrides.
        vocab_size: tokens of the dataset's vocabulary; a preset gets it, rounded up to
            ``vocab_multiple``; a checkpoint must hold it.

    Raises:
        ConfigError: unknown preset, a vocabulary too small, or attention dropout.
    """
    vocab_size = config.vocab_size or vocab_size
    if config.preset is not None:
        result = _preset_configuration(config, vocab_size)
    else:
        result = _pretrained_configuration(config)
    if result.vocab_size < vocab_size:
        raise ConfigError(
            f"model: the vocabulary has {result.vocab_size} tokens, the dataset {vocab_size}; "
            "tokenize the dataset with the model's own tokenizer"
        )
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(result, name, 0.0):
            raise ConfigError(f"model: {name} is set; varlen attention has no dropout")
    return result


def _preset_configuration(config: ModelConfig, vocab_size: int) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415

    from megapack.training.model.modeling_gpt2_alibi import GPT2AlibiConfig  # noqa: PLC0415

    preset = PRESETS.get(str(config.preset))
    if preset is None:
        known = ", ".join(PRESETS)
        raise ConfigError(f"model: preset {config.preset!r} is unknown; choose one of {known}")
    rows = -(-vocab_size // config.vocab_multiple) * config.vocab_multiple
    values = {**preset.fields, "vocab_size": rows, **_no_special_tokens(), **config.overrides}
    if not preset.alibi:
        return AutoConfig.for_model(preset.model_type, **values)
    slopes = alibi_slopes(values["n_head"]).tolist()
    return GPT2AlibiConfig(**values, alibi_slopes=slopes)


def _pretrained_configuration(config: ModelConfig) -> Any:
    """The checkpoint's own, with every dropout at 0 unless an override asks for it."""
    from transformers import AutoConfig  # noqa: PLC0415

    register_architectures()
    try:
        result = AutoConfig.from_pretrained(config.pretrained)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {config.pretrained!r} cannot be loaded: {error}") from error
    for name in _DROPOUTS:
        if hasattr(result, name):
            setattr(result, name, 0.0)
    for name, value in config.overrides.items():
        if not hasattr(result, name):
            raise ConfigError(
                f"model: override {name!r} is no field of a {result.model_type} configuration"
            )
        setattr(result, name, value)
    return result


def _no_special_tokens() -> dict[str, None]:
    """Boundaries come from the index, never from token values."""
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def register_architectures() -> None:
    """Make transformers' Auto classes know the architectures that are ours."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    from megapack.training.model import modeling_gpt2_alibi as ours  # noqa: PLC0415

    AutoConfig.register("gpt2_alibi", ours.GPT2AlibiConfig, exist_ok=True)
    AutoModelForCausalLM.register(ours.GPT2AlibiConfig, ours.GPT2AlibiLMHeadModel, exist_ok=True)
    ours.GPT2AlibiConfig.register_for_auto_class("AutoConfig")
    ours.GPT2AlibiLMHeadModel.register_for_auto_class("AutoModelForCausalLM")


def attention_needs(configuration: Any, device: torch.device, dtype: torch.dtype) -> AttentionNeeds:
    """What the architecture asks of attention: heads, window, soft cap, ALiBi."""
    heads = configuration.num_attention_heads
    width = getattr(configuration, "qk_head_dim", None) or getattr(configuration, "head_dim", None)
    width = width or configuration.hidden_size // heads
    window = getattr(configuration, "sliding_window", None)
    layer_types = getattr(configuration, "layer_types", None)
    return AttentionNeeds(
        device=device,
        dtype=dtype,
        head_dim=width,
        num_heads=heads,
        num_key_value_heads=getattr(configuration, "num_key_value_heads", None) or heads,
        window="sliding_attention" in layer_types if layer_types else bool(window),
        softcap=bool(getattr(configuration, "attn_logit_softcapping", None)),
        alibi=configuration.model_type == "gpt2_alibi",
    )
