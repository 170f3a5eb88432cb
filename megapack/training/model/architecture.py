"""Transformers configuration of a model, and checks of it and of its checkpoint.

``model_configuration`` makes it from a preset, a checkpoint or any transformers configuration, with
overrides; ``check_checkpoint`` compares tensors, ``attention_needs`` lists requirements of the
attention, and ``position_limit`` returns the limit on the length of documents. transformers accepts
unknown fields, sizes that fit no layer, and checkpoints of other models; this module refuses them
before a model is built.

    model_configuration(ModelConfig(preset="llama_1b", overrides={"num_layer": 2}), 32000)
    # ConfigError: model.overrides.num_layer: no field of a llama configuration ...
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from megapack.attention import AttentionNeeds, alibi_slopes
from megapack.calls import nearest
from megapack.errors import ConfigError
from megapack.training.config import ModelConfig
from megapack.training.model.flops import num_experts
from megapack.training.presets import PRESETS

_DROPOUTS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields of published files that models with RoPE use without declaring them.
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "head_dim")
# Fields that must be 1 or more if the architecture has them.
_SIZES = re.compile(
    r"(size|dim|rank|inner|embd|positions|embeddings|layers?|heads?|experts|per_tok)$"
)
_LEARNED = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "biogpt")  # model types with learned positions
_SHOWN = 3  # tensors in an error
# Keys of a config.json about the file and its origin.
_ABOUT_THE_FILE = (
    *("architectures", "auto_map", "_name_or_path", "transformers_version"),
    *("dtype", "torch_dtype", "_attn_implementation_autoset"),
)


def model_configuration(config: ModelConfig, vocab_size: int) -> Any:
    """Return the transformers configuration of a run.

    A preset, or a ``config`` without ``vocab_size``, gets the dataset's vocabulary size, rounded up
    to a multiple of ``vocab_multiple``. Raises ConfigError for overrides that are not fields or fit
    no model, a vocabulary smaller than the dataset's, or attention dropout.
    """
    vocab_size = config.vocab_size or vocab_size
    register_architectures()
    if config.pretrained is None:
        result = _new_configuration(config, vocab_size)
    else:
        result = _loaded_configuration(config)
    if result.vocab_size < vocab_size:
        raise ConfigError(
            f"model: the vocabulary has {result.vocab_size} tokens, the dataset {vocab_size}; "
            "tokenize the dataset with the model's own tokenizer"
        )
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(result, name, 0.0):
            raise ConfigError(f"model: {name} is set; varlen attention has no dropout")
    return result


def _new_configuration(config: ModelConfig, vocab_size: int) -> Any:
    """Make the configuration of a preset, or of the keys of ``model.config``, in YAML or a file."""
    from transformers import AutoConfig  # noqa: PLC0415

    keys = _keys(config)
    kind = keys.pop("model_type", None)
    _check_kind(kind)
    rows = -(-vocab_size // config.vocab_multiple) * config.vocab_multiple
    values = {"vocab_size": rows, **keys}

    def make() -> Any:
        try:  # transformers warns of special tokens that a smaller vocabulary does not have
            result = AutoConfig.for_model(kind, **{**dict.fromkeys(_SPECIAL), **values})
        except StrictDataclassError:
            result = AutoConfig.for_model(kind, **values)
        # Without special tokens: document boundaries come from the index, and an embedding would
        # not train the row of ``pad_token_id``.
        for name in set(_SPECIAL) - set(values):
            with suppress(StrictDataclassError):  # few classes require one
                setattr(result, name, None)
        _remove_dropout(result, values)
        if kind == "gpt2_alibi":
            result.alibi_slopes = alibi_slopes(result.n_head).tolist()
        return result

    def change() -> Any:
        values.update(config.overrides)
        return make()

    try:
        before = AutoConfig.for_model(kind)
    except Exception as error:  # from the validators of its class
        text = " ".join(str(error).split())
        raise ConfigError(f"model.config: model_type {kind} is unsupported: {text}") from error
    _check_decoder(before)
    if config.config is not None:
        before = _overridden(values.copy(), before, make, where="model.config")
    return _overridden(config.overrides, before, change, known=(*keys,))


def _keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of a preset or of ``model.config``, without those about a file. A config.json
    contains all fields; its dropouts and special tokens are those of the original training, so this
    function drops them."""
    from transformers import PreTrainedConfig  # noqa: PLC0415

    if config.preset is not None:
        return dict(PRESETS[config.preset])
    if isinstance(config.config, dict):
        keys = copy.deepcopy(config.config)
    else:
        try:
            keys = PreTrainedConfig.get_config_dict(config.config)[0]
        except (OSError, ValueError) as error:
            raise _not_loaded(config.config, error) from error
        keys = {k: v for k, v in keys.items() if k not in {*_SPECIAL, *_DROPOUTS}}
    return {name: value for name, value in keys.items() if name not in _ABOUT_THE_FILE}


def _loaded_configuration(config: ModelConfig) -> Any:
    """Load the configuration of a checkpoint; every dropout is 0 unless an override asks for it."""
    from transformers import AutoConfig  # noqa: PLC0415

    try:
        result = AutoConfig.from_pretrained(config.pretrained)
    except Exception as error:  # from the validators of its class
        raise _not_loaded(config.pretrained, error) from error
    _check_decoder(result)
    _remove_dropout(result)

    def change() -> Any:
        for name, value in config.overrides.items():
            setattr(result, name, value)
        result.validate()
        return result

    return _overridden(config.overrides, result, change)


def _not_loaded(source: Any, error: Exception) -> ConfigError:
    why = " ".join(str(error).split())
    if (Path(str(source)) / "config.yaml").exists():
        why = f"it is a run directory; its model is in {source}/model (megapack-export)"
    return ConfigError(f"model: {source!r} cannot be loaded: {why}")


def _check_kind(kind: Any) -> None:
    """Check that transformers has a causal language model of this type. Raises ConfigError."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415

    # Look up one type: iterating over the mapping imports two hundred modules on every rank.
    name = str(kind)
    if name in CONFIG_MAPPING and CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    known = [one.model_type for one in MODEL_FOR_CAUSAL_LM_MAPPING]
    raise ConfigError(
        f"model.config: transformers has no causal language model of model_type {kind!r}"
        + nearest(name, known)
    )


def _remove_dropout(configuration: Any, given: Collection[str] = ()) -> None:
    for name in set(_DROPOUTS) - set(given):
        if hasattr(configuration, name):
            setattr(configuration, name, 0.0)


def _check_decoder(configuration: Any) -> None:
    """Raise ConfigError unless the model is a text decoder with equal attention sizes per layer."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    kind = f"model: architecture {configuration.model_type!r}"
    try:
        *sizes, _ = (getattr(configuration, name, None) for name in names)
    except RuntimeError as error:  # sizes differ between layers
        raise ConfigError(f"{kind} cannot be trained: {' '.join(str(error).split())}") from error
    for name, size in zip(names, sizes, strict=False):
        if not isinstance(size, int):
            raise ConfigError(f"{kind} has no {name}; it must be a text decoder with attention")


def _overridden(
    overrides: Mapping[str, Any],
    before: Any,
    change: Callable[[], Any],
    known: tuple[str, ...] = (),
    where: str = "model.overrides",
) -> Any:
    """Return the configuration with overrides, after checks of their names, values and sizes.

    Args:
        before: configuration without the overrides.
        change: returns the configuration with them; it may change ``before``.
        known: further names that the class accepts.
        where: key of the overrides, for messages.
    """
    if not overrides:
        return change()
    _check_names_and_values(overrides, before, known, where)
    problems: list[str] = []
    try:
        with _rope_warnings(problems):
            result = change()
    except Exception as error:  # from the validators of its class
        problems.insert(0, str(error))
    problem = problems[0] if problems else _find_conflict(result.get_text_config(decoder=True))
    if problem:
        text = " ".join(problem.split())
        # Name the overrides that the error text contains (``num_layers`` or "layers"), else all.
        in_words = [
            name for name in overrides if name.removeprefix("num_").replace("_", " ") in text
        ]
        names = [name for name in overrides if name in text] or in_words or list(overrides)
        raise ConfigError(f"{where}.{', '.join(names)}: {text}")
    return result


def _check_names_and_values(
    overrides: Mapping[str, Any], before: Any, known: tuple[str, ...], section: str
) -> None:
    names = {
        *known,
        *(_ROPE_FIELDS if hasattr(before, "rope_parameters") else ()),
        *before.to_dict(),
        *type(before).attribute_map,
    }
    names |= {field.name for field in dataclasses.fields(before)}
    for name, value in overrides.items():
        where = f"{section}.{name}"
        if section == "model.config" and name not in names and value in (None, False):
            continue  # an unknown option that is off
        if name not in names or name.startswith("_"):
            hint = nearest(name, sorted(names))
            raise ConfigError(f"{where}: no field of a {before.model_type} configuration{hint}")
        default = getattr(before, name, None)
        is_size = (
            type(default) is int and default > 0 and _SIZES.search(name) and "shared" not in name
        )
        if is_size and type(value) is int and value < 1:
            raise ConfigError(f"{where} is {value}; it must be 1 or more")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where} is {value}; it must be finite")


def _find_conflict(configuration: Any) -> str | None:
    """Return a conflict of values that transformers does not detect; None: no conflict."""
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_experts_per_tok")
    hidden, heads, groups, chosen = (getattr(configuration, name, None) for name in sizes)
    if heads and not getattr(configuration, "head_dim", None) and hidden % heads:
        return f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
    if heads and groups and heads % groups:
        return f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}"
    experts = num_experts(configuration)
    if experts and chosen and chosen > experts:
        return f"num_experts_per_tok is {chosen}, but there are {experts} experts"
    rope = getattr(configuration, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):
        theta = one.get("rope_theta", 1.0) if isinstance(one, dict) else 1.0
        if not (isinstance(theta, int | float) and 0 < theta < math.inf):
            return f"rope_theta of rope_parameters is {theta}; it must be positive"
    return None


@contextmanager
def _rope_warnings(warnings: list[str]) -> Iterator[None]:
    """Append transformers' warnings about RoPE's parameters to ``warnings``. Ignores those of
    ``warning_once``: each appears once per process, so a model would be refused at its first check
    and accepted at the next."""
    logger = logging.getLogger("transformers.modeling_rope_utils")
    level, handler = logger.level, logging.Handler(logging.WARNING)

    def emit(record: logging.LogRecord) -> None:
        if record.funcName != "warning_once":
            warnings.append(record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def check_checkpoint(config: ModelConfig, configuration: Any) -> None:
    """Check that checkpoint and model have tensors of the same names and shapes: others would get
    random values, or be lost. Raises ConfigError with the names of the first such tensors."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    if config.pretrained is None:
        return
    _, report = AutoModelForCausalLM.from_pretrained(
        config.pretrained,
        config=copy.deepcopy(configuration),
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    shapes = {
        f"{name} {tuple(saved)} instead of {tuple(expected)}": name
        for name, saved, expected in report["mismatched_keys"]
    }
    problems = {
        "lacks tensors of the model, which would get random values": report["missing_keys"],
        "has tensors that the model lacks, which would be lost": report["unexpected_keys"],
        "has tensors of other shapes, which would get random values": shapes,
    }
    for problem, names in problems.items():
        tensors = sorted(
            text
            for text in names
            if not any(fnmatchcase(shapes.get(text, text), p) for p in config.allow_missing)
        )
        if tensors:
            more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
            raise ConfigError(
                f"model: checkpoint {config.pretrained!r} {problem}: {', '.join(tensors[:_SHOWN])}"
                f"{more}; make model.overrides fit the checkpoint, or name them in "
                "model.allow_missing"
            )


def register_architectures() -> None:
    """Register megapack's architectures with transformers' Auto classes."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    from megapack.training.model import modeling_gpt2_alibi as ours  # noqa: PLC0415

    AutoConfig.register("gpt2_alibi", ours.GPT2AlibiConfig, exist_ok=True)
    AutoModelForCausalLM.register(ours.GPT2AlibiConfig, ours.GPT2AlibiLMHeadModel, exist_ok=True)
    ours.GPT2AlibiConfig.register_for_auto_class("AutoConfig")
    ours.GPT2AlibiLMHeadModel.register_for_auto_class("AutoModelForCausalLM")


def attention_needs(configuration: Any, device: torch.device, dtype: torch.dtype) -> AttentionNeeds:
    """Return what the attention must support: heads, window, soft cap, ALiBi."""
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


@dataclass(frozen=True, kw_only=True)
class PositionLimit:
    """Longest document that a transformers configuration allows."""

    tokens: int
    source: str  # field of the configuration with the limit
    remedy: str  # alternative to shorter documents
    is_hard: bool = True
    """True: the model has no positions beyond ``tokens``. False: it was not trained on them."""


def position_limit(configuration: Any, wanted: int) -> PositionLimit | None:
    """Return the limit of an architecture; None: any length, as with ALiBi. ``remedy`` describes
    the change that allows ``wanted`` tokens."""
    limit = getattr(configuration, "max_position_embeddings", None)
    alibi = configuration.model_type == "gpt2_alibi" or getattr(configuration, "alibi", False)
    if not isinstance(limit, int) or alibi:
        return None
    is_hard, remedy = True, f"set model.overrides.max_position_embeddings={wanted}"
    if configuration.model_type in _LEARNED:
        remedy = "use a model with RoPE or ALiBi"
    elif getattr(configuration, "rope_parameters", None):
        is_hard = False
        remedy += (
            " (RoPE works for any position, but a checkpoint trained on shorter documents may need "
            "another rope_theta or rope_type in model.overrides.rope_parameters)"
        )
    source = "max_position_embeddings"
    return PositionLimit(tokens=limit, source=source, remedy=remedy, is_hard=is_hard)
