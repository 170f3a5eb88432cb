"""Records of a run: flat keys of everything that determines it, kept in checkpoints and compared.

- ``model_record``, ``tokenizer_digest``, ``flatten``: parts of a record
- ``check_record``: a checkpoint's record against that of the run that resumes from it

    record = {"optimizer.lr": 0.0003, "model.hidden_act": "silu"}
    check_record({**record, "model.hidden_act": "gelu"}, record)
    # -> ResumeError: ... model.hidden_act was 'silu' and is 'gelu'. Restore ...
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import xxhash

from megapack.errors import ResumeError

# Fields of a transformers configuration that name its origin, not the model.
_ORIGIN = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")

Record = Mapping[str, Any]


def model_record(architecture: Any) -> dict[str, Any]:
    """Return every field of a transformers configuration as ``model.<field>``; JSON."""
    tree = {name: v for name, v in architecture.to_dict().items() if name not in _ORIGIN}
    fields: dict[str, Any] = json.loads(json.dumps(flatten(tree, "model."), default=str))
    return fields


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
    current: Record,
    saved: Record | None,
    allow_change: Collection[str] = (),
    *,
    is_branch: bool = False,
    option: str = "checkpoint.allow_change",
) -> list[str]:
    """Compare the record of a checkpoint with that of this run.

    Args:
        current: of this run.
        saved: of the checkpoint; None: it has no record, which ``run`` in ``allow_change`` accepts.
        allow_change: keys, sections of keys, or last parts of keys that may differ.
        is_branch: the run begins at another run's checkpoint, in order to differ from there on:
            only the model, the tokenizer and the data must be the same.
        option: name of ``allow_change`` in the message.

    Returns:
        A sentence for every difference that is allowed.

    Raises:
        ResumeError: naming every other difference with both values.
    """
    if saved is None:
        if "run" in allow_change:
            return ["the checkpoint has no record of its run: nothing else was compared"]
        raise ResumeError(
            "the checkpoint has no record of the run that wrote it, so its configuration, model, "
            f"tokenizer and data cannot be compared; set {option}=[run] to continue without that"
        )
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
            is_within(key, allow_change)
            or key.rpartition(".")[2] in allow_change
            or (is_branch and not is_fixed)
        ):
            changes.append(text)
        else:
            refused[key] = text
    if refused:
        raise ResumeError(
            f"this run would not continue the checkpoint's run: {'; '.join(refused.values())}. "
            f"Restore the former configuration or files, or set {option}=[{','.join(refused)}] to "
            "continue with the new ones"
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


def is_within(key: str, names: Collection[str]) -> bool:
    """Return whether a key, or a section that contains it, is among ``names``."""
    parts = key.split(".")
    return any(".".join(parts[: end + 1]) in names for end in range(len(parts)))
