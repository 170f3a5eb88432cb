"""Everything that determines a run of ``megapack-pretrain``, as flat keys for its checkpoints.

``run_record`` walks all keys of the configuration: a key counts unless ``NO_EFFECT`` names it, so a
new key is compared by default. The keys of the model and the data are replaced by what they
resolve to: the fields of the transformers configuration, the attention backend, digests of the
tokenizer and of the data's bytes. The order of samples is compared by ``megapack.data.resume``.

    {"optimizer.lr": 0.0003, "model.hidden_act": "silu", "data.content": {"0 9f3c": [...]}, ...}
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from megapack.config import to_dict
from megapack.data.resume import content_digests
from megapack.data.run_record import flatten, is_within, model_record, tokenizer_digest
from megapack.data.steps import StepConfig
from megapack.training.config import PretrainConfig
from megapack.training.engine.inputs import Inputs

# Keys, or sections, that do not determine what a step computes, and why.
_LENGTH = "the learning rate depends on it; a jump is reported, and the length of a run may change"
_ORDER = "compared as the order of samples, stage by stage (megapack.data.resume)"
_RESOLVED = "the resolved model, tokenizer or data are compared"
_OUTPUT = "decides what is written or checked, not what is trained"
_LAYOUT = "divides the same computation among ranks, memory or time"
NO_EFFECT = {
    **dict.fromkeys(("run_dir", "stop_at", "logging", "evaluation", "checkpoint"), _OUTPUT),
    **dict.fromkeys(("num_steps", "num_epochs"), _LENGTH),
    **{f"data.{field.name}": _ORDER for field in fields(StepConfig)},
    **dict.fromkeys(("seed", "data.loss", "data.fim"), _ORDER),
    **{
        f"model.{name}": _RESOLVED
        for name in ("preset", "pretrained", "config", "overrides", "allow_missing")
    },
    **dict.fromkeys(("model.vocab_size", "model.vocab_multiple"), _RESOLVED),
    **dict.fromkeys(("model.tokenizer", "model.attention_backend"), _RESOLVED),
    **dict.fromkeys(("data.prefix", "data.index", "data.blend"), _RESOLVED),
    **dict.fromkeys(("data.valid_prefix", "data.valid_index", "model.probe"), _OUTPUT),
    **dict.fromkeys(("data.verify", "data.check_ranks_every", "optimizer.max_skipped"), _OUTPUT),
    **dict.fromkeys(("data.micro_batch_tokens", "data.uneven", "engine.zero_stage"), _LAYOUT),
    **dict.fromkeys(
        (
            "engine.activation_checkpointing",
            "engine.offload_activations",
            "engine.sequence_parallel_size",
            "engine.timeout_minutes",
            "engine.silence_seconds",
            "engine.stall_seconds",
        ),
        _LAYOUT,
    ),
}


def run_record(
    config: PretrainConfig,
    inputs: Inputs,
    architecture: Any,
    *,
    tokenizer: Any = None,
    attention: str | None = None,
) -> dict[str, Any]:
    """Return what determines a run besides the order of its samples; JSON.

    Args:
        config: of the run.
        inputs: its open data.
        architecture: transformers configuration of its model.
        tokenizer: exported with the model.
        attention: backend that was chosen; None: not known yet, and not compared.
    """
    record = {
        key: value
        for key, value in flatten(to_dict(config)).items()
        if not is_within(key, NO_EFFECT)
    }
    record |= model_record(architecture)
    if attention is not None:
        record["model.attention_backend"] = attention
    record["model.tokenizer"] = None if tokenizer is None else tokenizer_digest(tokenizer)
    record["data.content"] = content_digests(inputs.data)
    resolved: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return resolved
