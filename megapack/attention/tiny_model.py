"""Tiny models of an architecture, rows of documents to run them on, and traces of their modules.

- ``tiny_configuration``: configuration of a tiny model of the same architecture.
- ``randomize``: add noise to the weights, so that every layer affects the output.
- ``Row``: documents in one row, as in training; ``plain_arguments``: one document alone;
  ``branches``: two sequences that share a prefix, as a tree.
- ``trace``, ``concatenate_traces``, ``difference``: record and compare outputs of all modules.

    tiny_configuration(AutoConfig.for_model("llama")).hidden_size  # -> 512, 4 heads of 128
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from megapack.attention.problem import TreeSegments
from megapack.attention.transformers_interface import tree_arguments, varlen_arguments

LENGTHS = (37, 23)  # of two documents; both exceed a tiny window or chunk

# Rules shrink a transformers configuration by the names of its fields. The tiny model has just
# enough of the first layers to contain one of every kind, four heads with the model's head width
# and grouping, few experts and short windows. A size that is a multiple of the hidden size stays
# the same multiple.
HEADS, EXPERTS, VOCABULARY, WINDOW, CHUNK = 4, 4, 128, 8, 16
_LARGEST = {
    "last token": VOCABULARY - 1,
    "key heads": 2,
    "one": 1,
    "experts": EXPERTS,
    "rank": 32,
    "window": WINDOW,
    "chunk": CHUNK,
    "cap": 2,
    "width": 128,
}

# The first match decides. Fields that match no rule keep their values.
RULES = {
    r"dropout|pdrop|drop_rate|layerdrop|jitter": "off",
    r"(aux|z)_loss_coef": "on",  # large enough to matter next to the loss of the labels
    r"_token_(id|index)$": "last token",
    r"vocab_size": "vocabulary",
    r"(key_value|kv)_heads?$|n_head_kv$": "key heads",
    r"^(num|n)_(.*_)?heads?$|_n_heads$|num_(.*_)?heads$|d_ssm": "heads",
    r"(^|_)n_groups?$|^topk_group$|^num_groups$|shared_experts": "one",
    r"experts_per_tok|top_?k(_experts)?$|moe_k$|num_selected_experts": "experts",
    r"(num|n)_(.*_)?experts$|expert_num$": "experts",
    r"lora_rank": "rank",
    r"softcap": "cap",
    r"window(_size)?$": "window",
    r"chunk_size": "chunk",
    r"^(hidden_size|n_embd|d_model)$": "hidden",
    r"hidden_size|intermediate_size|n_inner|ffn_dim|ffn_hidden|d_ff|lru_width": "width",
    r"embed_proj_dim|embedding_(dim|size)|(time_step|dt)_rank|(conv|inner)_dim": "width",
}
_PERIOD = re.compile(r"(period|_step|freq|interval|pattern|every_n_layers|first_k_dense_replace)$")


def tiny_configuration(configuration: Any, *, exact: bool = False, heads: int = HEADS) -> Any:
    """Return the configuration of a tiny model of the same architecture (its text decoder). May
    raise any exception of the configuration's class.

    Args:
        exact: keep the number of layers, for architectures whose layers refer to each other, and
            keep hidden size = heads x head width if the model has it (Helium relies on it).
        heads: attention heads; at most those of the model.
    """
    text = configuration.get_text_config(decoder=True)
    fields = text.to_dict()
    fields.pop("dtype", None)
    layers = int(text.num_hidden_layers)
    kept = layers if exact else _num_layers(fields, layers)
    shrink = _Shrink(text, heads, exact)
    tiny = {}
    for name, value in fields.items():
        if value == layers and re.search(r"layers?$", name):
            tiny[name] = kept
        elif re.search(r"shared_layers$", name) and not exact:
            tiny[name] = kept // 2 if value else value
        elif _per_layer(name, value, layers):
            tiny[name] = shrink(name, value[:kept])
        else:
            tiny[name] = shrink(name, _of_first_layers(kept, value))
    tiny["use_cache"] = False
    return type(text).from_dict(tiny)


def _num_layers(fields: dict[str, Any], layers: int) -> int:
    """Return the smallest number of first layers that contains one of every kind, at least 2."""
    needed, shared = 2, False
    for name, value in fields.items():
        if _per_layer(name, value, layers):
            kinds = [repr(kind) for kind in value]
            if len(set(kinds)) < layers:  # else the list holds layer numbers
                needed = max(needed, *(kinds.index(kind) + 1 for kind in kinds))
        elif isinstance(value, list) and value and isinstance(value[0], str):
            needed = max(needed, len(value))  # a pattern of kinds that repeats
        elif type(value) is int and _PERIOD.search(name) and value < layers:
            needed = max(needed, value + 1)
        elif value and name.endswith("shared_layers"):
            shared = True
    return min(needed * (1 + shared), layers)


def _per_layer(name: str, value: Any, layers: int) -> bool:
    """Return whether a field has one entry per layer: a list, or a pattern of letters."""
    listed = isinstance(value, list) or (isinstance(value, str) and "pattern" in name)
    return listed and len(value) == layers


def _of_first_layers(kept: int, value: Any) -> Any:
    """Keep the first layers of a mapping from layer numbers; return other values unchanged."""
    numbered = isinstance(value, dict) and all(str(key).isdigit() for key in value)
    return {k: v for k, v in value.items() if int(k) < kept} if numbered else value


class _Shrink:
    """Map from name and value of a field to its value in the tiny configuration."""

    def __init__(self, text: Any, most_heads: int, exact: bool) -> None:
        fields = text.to_dict()
        names = ("num_attention_heads", "num_heads", "n_heads", "n_head")
        counts = map(fields.get, names)
        self.heads = next((n for n in counts if isinstance(n, int) and n > 0), 0)
        self.hidden = int(text.hidden_size)
        self.head_ratio = Fraction(min(most_heads, self.heads or HEADS), self.heads or HEADS)
        self.states = any(re.search("mamba|ssm|expand|state_size", name) for name in fields)
        head_dim = fields.get("head_dim")
        tied = exact and head_dim and head_dim * self.heads == self.hidden
        free = not self.heads or (head_dim and not tied and not self.states)
        width = Fraction(min(_LARGEST["width"], self.hidden), self.hidden)
        self.ratio = width if free else self.head_ratio

    def __call__(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self(str(key), inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self(name, inner) for inner in value]
        rule = next((rule for pattern, rule in RULES.items() if re.search(pattern, name)), None)
        if rule is None or isinstance(value, bool) or not isinstance(value, int | float):
            return value
        if rule in ("off", "on"):
            return type(value)(rule == "on" and value != 0)
        return type(value)(self._number(rule, int(value)))

    def _number(self, rule: str, value: int) -> int:
        if value <= 0:
            return value
        if rule == "vocabulary":
            return VOCABULARY
        if rule == "heads" or (rule == "key heads" and value == self.heads):
            return math.ceil(value * self.head_ratio)
        tied = value == self.hidden or (self.states and value % self.hidden == 0)
        if rule == "hidden" or (rule == "width" and tied):
            exact = value * self.ratio
            # Round up to a multiple of 16, which every kernel takes.
            return int(exact) if exact.denominator == 1 else -(-int(exact) // 16) * 16
        return min(value, _LARGEST[rule])


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Add noise to the weights, because with initial weights attention hardly affects the
    output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.add_(noise.to(parameter.device, parameter.dtype))


# Output of every module by name, float32 ``[T, ...]``, in order; the last is "", the logits.
Trace: TypeAlias = dict[str, Tensor]


class Row(NamedTuple):
    """Documents in one row, as a model gets them in training."""

    tokens: Tensor  # ``[1, T]`` int64
    labels: Tensor  # ``[1, T]`` int64: the next token of the same document, -100 at its end
    position_ids: Tensor  # ``[1, T]`` int64, from 0 in every document
    cu_seqlens: Tensor  # ``[documents + 1]`` int32
    max_seqlen: int

    @staticmethod
    def of(documents: Sequence[Tensor]) -> Row:
        """Join documents, int64 ``[L]`` each, on one device."""
        lengths, device = [len(tokens) for tokens in documents], documents[0].device
        labels = [nn.functional.pad(tokens[1:], (0, 1), value=-100) for tokens in documents]
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        positions = [torch.arange(length, device=device) for length in lengths]
        return Row(
            tokens=torch.cat(list(documents)).unsqueeze(0),
            labels=torch.cat(labels).unsqueeze(0),
            position_ids=torch.cat(positions).unsqueeze(0),
            cu_seqlens=ends,
            max_seqlen=max(lengths),
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a transformers model's forward."""
        segments = varlen_arguments(self.cu_seqlens, self.max_seqlen)
        return {"input_ids": self.tokens, "position_ids": self.position_ids, **segments}


def plain_arguments(tokens: Tensor) -> dict[str, Any]:
    """Return the arguments of the usual forward pass of one document ``[L]``."""
    return {"input_ids": tokens.unsqueeze(0), "use_cache": False}


def branches(prefix: Tensor, one: Tensor, other: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Return the arguments of a tree of two branches, and the rows of both sequences, one after the
    other. All are int64 ``[L]``."""
    lengths = [len(prefix), len(one), len(other)]
    rows = torch.arange(sum(lengths), device=prefix.device)
    first, second, third = torch.split(rows, lengths)
    paths = [first, torch.cat([first, second]), torch.cat([first, third])]
    sizes = torch.tensor([lengths, [len(path) for path in paths]], device=prefix.device)
    ends_q, ends_k = nn.functional.pad(sizes.cumsum(1), (1, 0)).int()
    longest, longest_path = sizes.amax(1).tolist()
    segments = TreeSegments(ends_q, ends_k, torch.cat(paths).int(), longest, longest_path)
    depths = torch.cat(
        [first, *(torch.arange(len(p), device=p.device)[len(first) :] for p in paths)]
    )
    tokens = torch.cat([prefix, one, other])
    inputs = {"input_ids": tokens[None], "position_ids": depths[None]}
    return {**inputs, **tree_arguments(segments)}, torch.cat(paths[1:])


def trace(model: Any, arguments: dict[str, Any]) -> Trace:
    """Run the model without gradients and return its ``Trace``."""
    length = arguments["input_ids"].shape[1]
    outputs: Trace = {}

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        value = output[0] if isinstance(output, tuple) else output
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
            value = value[0] if value.shape[:2] == (1, length) else value
            if value.shape[0] == length:
                outputs.setdefault(name, value.detach().float())

    hooks = [m.register_forward_hook(partial(keep, n)) for n, m in model.named_modules() if n]
    try:
        with torch.no_grad():
            logits = model(**arguments).logits
    finally:
        for hook in hooks:
            hook.remove()
    return {**outputs, "": logits[0].float()}


def concatenate_traces(traces: Iterable[Trace]) -> Trace:
    """Join traces of single documents into the trace of one row."""
    listed = list(traces)
    names = [name for name in listed[0] if all(name in trace for trace in listed)]
    return {name: torch.cat([trace[name] for trace in listed]) for name in names}


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, in standard deviations of ``theirs``."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float((ours - theirs).abs().max() / theirs.std().clamp(min=1e-6))
