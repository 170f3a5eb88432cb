"""Everything that determines a run, as flat keys; compared at a resume.

``run_record`` walks all keys of the configuration: a key counts unless ``NO_EFFECT`` names it, so a
new key is compared by default. The keys of the model and the data are replaced by what they
resolve to: the fields of the transformers configuration, the attention backend, digests of the
tokenizer and of the data's bytes. The order of samples is compared by ``megapack.data.resume``.

    {"seed": 0, "optimizer.lr": 0.0003, "model.rope_theta": 1e4, "data.content": ["9f..."], ...}
    check_record(record | {"seed": 1}, record)  # -> ResumeError: ... seed was 0 and is 1 ...
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import xxhash

from megapack.config import to_dict
from megapack.data.resume import content_digests
from megapack.data.steps import ScheduleConfig
from megapack.errors import ResumeError
from megapack.training.config import PretrainConfig
from megapack.training.engine.inputs import Inputs

logger = logging.getLogger("megapack")

# Keys, or sections, that do not determine what a step computes, and why.
_LENGTH = "the learning rate depends on it; a jump is reported, and the length of a run may change"
_ORDER = "compared as the order of samples, stage by stage (megapack.data.resume)"
_RESOLVED = "the resolved model, tokenizer or data are compared"
_OUTPUT = "decides what is written or checked, not what is trained"
_LAYOUT = "divides the same computation among ranks, memory or time"
NO_EFFECT = {
    **dict.fromkeys(("run_dir", "stop_at", "logging", "evaluation", "checkpoint"), _OUTPUT),
    **dict.fromkeys(("num_steps", "num_epochs"), _LENGTH),
    **{f"data.{field.name}": _ORDER for field in fields(ScheduleConfig)},
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
# Fields of a transformers configuration that name its origin, not the model.
_ORIGIN = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")

Record = Mapping[str, Any]


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
        if not _is_within(key, NO_EFFECT)
    }
    record |= model_record(architecture)
    if attention is not None:
        record["model.attention_backend"] = attention
    record["model.tokenizer"] = None if tokenizer is None else tokenizer_digest(tokenizer)
    record["data.content"] = content_digests(inputs.data)
    resolved: dict[str, Any] = json.loads(json.dumps(record, default=str))
    return resolved


def model_record(architecture: Any) -> dict[str, Any]:
    """Return every field of a transformers configuration as ``model.<field>``."""
    tree = {name: v for name, v in architecture.to_dict().items() if name not in _ORIGIN}
    return flatten(tree, "model.")


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of a transformers tokenizer: vocabulary, rules, special tokens, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    content = [rules, special, getattr(tokenizer, "chat_template", None)]
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, default=str).encode())


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings under dotted keys."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def check_record(
    current: Record, saved: Record, allow_change: Collection[str] = (), *, is_branch: bool = False
) -> list[str]:
    """Compare the record of a checkpoint with that of this run.

    Args:
        current: of this run.
        saved: of the checkpoint.
        allow_change: keys, sections of keys, or last parts of keys that may differ.
        is_branch: the run begins at another run's checkpoint, in order to differ from there on:
            only the model, the tokenizer and the data must be the same.

    Returns:
        A sentence for every difference that is allowed.

    Raises:
        ResumeError: naming every other difference with both values.
    """
    refused, changes = {}, []
    for key in sorted(current.keys() | saved.keys()):
        then, now = saved.get(key), current.get(key)
        if key == "model.attention_backend" and key not in current:
            continue
        if key == "data.content":
            then, now = _content_difference(then or {}, now or {})
        if then == now:
            continue
        text = f"{key} was {then!r:.200} and is {now!r:.200}"
        is_fixed = key.startswith("model.") or key == "data.content"
        if (
            _is_within(key, allow_change)
            or key.rpartition(".")[2] in allow_change
            or (is_branch and not is_fixed)
        ):
            changes.append(text)
        else:
            refused[key] = text
    if refused:
        raise ResumeError(
            f"this run would not continue the checkpoint's run: {'; '.join(refused.values())}. "
            "Restore the former configuration or files, or set checkpoint.allow_change="
            f"[{','.join(refused)}] to continue with the new ones"
        )
    return changes


def _content_difference(then: Record, now: Record) -> tuple[Record, Record]:
    """Return the sources that both runs have and whose bytes differ."""

    def differs(name: str) -> bool:
        for saved, present in zip(then[name], now[name], strict=True):
            if (saved is None) != (present is None):
                return True  # labels or weights came or went
            digests = zip(saved or (), present or (), strict=True)
            # The second digest is missing if there was no meta file.
            if any(a != b for a, b in digests if a is not None and b is not None):
                return True
        return False

    differing = sorted(filter(differs, then.keys() & now.keys()))
    return {name: then[name] for name in differing}, {name: now[name] for name in differing}


def _is_within(key: str, names: Collection[str]) -> bool:
    """Return whether a key, or a section that contains it, is among ``names``."""
    parts = key.split(".")
    return any(".".join(parts[: end + 1]) in names for end in range(len(parts)))
