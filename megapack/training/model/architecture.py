"""The model of a run: an architecture from transformers, our attention, our loss.

``TrainingModel`` is what DeepSpeed wraps: one stream of tokens in, the scaled sum of its losses
out. Saving goes through ``save_pretrained``, so that ``from_pretrained`` loads the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megapack.attention import (
    ATTENTION_NAME,
    AttentionNeeds,
    alibi_slopes,
    check_architecture,
    register,
    varlen_arguments,
)
from megapack.errors import ConfigError
from megapack.training.config import ModelConfig
from megapack.training.model.loss import linear_cross_entropy_sum
from megapack.training.model.presets import PRESETS

__all__ = [
    "TrainingModel",
    "attention_needs",
    "build_model",
    "model_configuration",
    "position_limit",
    "register_architectures",
    "try_model",
]

# Position embeddings with a row per position; all others reach any length.
_LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "biogpt")

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


def position_limit(configuration: Any) -> int | None:
    """The longest document (tokens) that learned position embeddings can number, if there are."""
    learned = configuration.model_type in _LEARNED_POSITIONS
    return int(configuration.max_position_embeddings) if learned else None


def try_model(
    configuration: Any, *, backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse an architecture that packed rows would train wrongly; see ``attention.guard``.

    Raises:
        ConfigError: naming the architecture, the layer and the difference.
    """
    register_architectures()
    register(backend)

    def loss(model: Any, row: Any) -> Tensor:
        wrapped = TrainingModel(model, chunk_tokens=32)
        result: Tensor = wrapped(
            row.tokens, row.labels, row.position_ids, row.cu_seqlens, max_seqlen=row.max_seqlen
        )
        return result

    check_architecture(
        configuration,
        attention=ATTENTION_NAME,
        build=_from_scratch,
        device=device,
        dtype=dtype,
        loss=loss,
    )


def _from_scratch(configuration: Any, implementation: str) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    alibi = configuration.model_type == "gpt2_alibi"
    if alibi:
        configuration.alibi_slopes = alibi_slopes(configuration.n_head).tolist()
    model = AutoModelForCausalLM.from_config(
        configuration, attn_implementation=implementation, dtype=torch.float32
    )
    if alibi:
        _give_slopes(model, configuration.alibi_slopes)
    return model


def build_model(
    config: ModelConfig,
    configuration: Any,
    *,
    backend: str,
    seed: int,
    chunk_tokens: int = 2048,
    fused_loss: bool = False,
) -> TrainingModel:
    """The model in float32 on the current default device.

    From scratch, the weights are a function of ``seed``, the architecture and the kind of device.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    register_architectures()
    register(backend)
    if config.pretrained is not None:
        model = AutoModelForCausalLM.from_pretrained(
            config.pretrained,
            config=configuration,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
        )
    else:
        # The generators of this process's device only: the others' would be initialised for it.
        mine = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=mine):
            torch.manual_seed(seed)
            model = _from_scratch(configuration, ATTENTION_NAME)
    if config.pretrained is not None and configuration.model_type == "gpt2_alibi":
        _give_slopes(model, configuration.alibi_slopes)
    # from_pretrained gives a model in evaluation mode, which would not checkpoint activations.
    return TrainingModel(model, chunk_tokens=chunk_tokens, fused_loss=fused_loss).train()


def _give_slopes(model: Any, slopes: list[float]) -> None:
    """After loading, which leaves buffers that no file holds without values."""
    for block in model.transformer.h:
        values = torch.tensor(slopes, dtype=torch.float32, device=block.attn.c_attn.weight.device)
        block.attn.register_buffer("alibi_slopes", values, persistent=False)


class TrainingModel(nn.Module):
    """A causal language model that takes one stream of tokens and gives the sum of its losses."""

    def __init__(self, model: nn.Module, *, chunk_tokens: int, fused_loss: bool = False) -> None:
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.fused_loss = fused_loss

    @property
    def configuration(self) -> Any:
        """The transformers configuration."""
        return self.model.config

    @property
    def num_parameters(self) -> int:
        """Trained numbers, tied ones once, wherever ZeRO-3 keeps them."""
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in self.parameters())

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        count = self.configuration.num_hidden_layers
        lists = (m for m in self.model.modules() if isinstance(m, nn.ModuleList))
        return next(layers for layers in lists if len(layers) == count)

    def hidden_states(
        self, tokens: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> Tensor:
        """``[T, width]``: the states before the head, of ``tokens [1, T]``."""
        base: Any = self.model.base_model
        result: Tensor = base(
            input_ids=tokens,
            position_ids=position_ids,
            **varlen_arguments(cu_seqlens, max_seqlen),
        ).last_hidden_state
        return result.flatten(0, 1)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        *,
        max_seqlen: int,
        scale: float = 1.0,
    ) -> Tensor:
        """``scale`` times the summed loss of one micro batch; see ``linear_cross_entropy_sum``."""
        hidden = self.hidden_states(tokens, position_ids, cu_seqlens, max_seqlen)
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        if (factor := _logit_factor(self.configuration)) != 1:
            hidden = hidden * factor
        return linear_cross_entropy_sum(
            hidden,
            head.weight,
            labels.flatten(),
            scale=scale,
            softcap=getattr(self.configuration, "final_logit_softcapping", None) or 0.0,
            chunk_tokens=self.chunk_tokens,
            fused=self.fused_loss,
        )

    def cast(self, dtype: torch.dtype) -> TrainingModel:
        """Parameters in ``dtype``; buffers (RoPE frequencies) keep their precision."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def checkpoint_activations(self) -> None:
        """Recompute every layer in the backward instead of keeping its activations."""
        model: Any = self.model
        enable = getattr(model, "activation_checkpointing_enable", None)
        if enable is None:  # transformers before 5.20
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            enable()

    def save(self, directory: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write what ``from_pretrained`` loads.

        Args:
            directory: created when missing.
            weights: full parameters by name in this module, when they are not held here (ZeRO-3).
        """
        state = None
        if weights is not None:
            state = {name.removeprefix("model."): value for name, value in weights.items()}
        model: Any = self.model
        model.save_pretrained(directory, state_dict=state)


def _logit_factor(configuration: Any) -> float:
    """What an architecture multiplies its logits with: Cohere's scale, Granite's divisor."""
    scale = getattr(configuration, "logit_scale", None) or 1.0
    divisor = getattr(configuration, "logits_scaling", None) or 1.0
    return float(scale) / float(divisor)
