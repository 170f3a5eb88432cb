"""Where a leak begins: inputs and outputs of every module, reduced to a few numbers per token.

A module leaks first if its outputs change at tokens of unchanged documents and its inputs do not:

    module              inputs   outputs
    self_attn.q_proj    equal    equal
    self_attn.o_proj    differ   differ      its inputs leak already
    self_attn           equal    differ      here
    mlp                 differ   differ

Hooks see all modules, also those that a plain function calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from megapack.probe.boundaries import Documents

WIDTH = 4  # numbers per token

# Outputs at unchanged tokens may differ by this fraction of the largest difference at changed
# tokens, because a mixture of experts may sum in another order, and half precision rounds.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}


def per_token(value: Any, documents: Documents) -> Tensor | None:
    """Return a float tensor as ``(tokens, anything)``; None if it has no dimension of tokens."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() == 0:
        return None
    rows, row, shape = documents.rows, documents.row, value.shape
    if shape[:2] == (rows, row):
        value = value.flatten(0, 1)
    elif shape[:2] == (1, rows * row):
        value = value[0]
    elif shape[:2] == (row, rows):
        value = value.transpose(0, 1).flatten(0, 1)
    elif value.dim() == 4 and shape[0] == rows and shape[2] == row:
        value = value.transpose(1, 2).flatten(0, 1)
    elif value.dim() == 3 and shape[0] == rows and row <= shape[2] < row + 16:
        value = value[..., :row].transpose(1, 2).flatten(0, 1)  # channels of a convolution
    elif shape[0] != rows * row:
        return None
    return value.reshape(rows * row, -1)


def reduce(value: Tensor) -> Tensor:
    """Return ``(tokens, at most WIDTH)`` float32: sums with random signs. Infinities, such as
    logits of unused ids, count as 0."""
    with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
        value = value.detach()
        value = torch.where(value.isinf(), 0, value)
        width = value.shape[1]
        if width <= WIDTH:
            return value.float()
        key = (width, value.device)
        if key not in _SIGNS:
            generator = torch.Generator().manual_seed(width)
            signs = torch.randint(0, 2, (width, WIDTH), generator=generator) * 2.0 - 1
            _SIGNS[key] = signs.to(value.device)
        return value.float() @ _SIGNS[key]


_SIGNS: dict[tuple[int, torch.device], Tensor] = {}


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


class Call:
    """One call of a module: its tensors, reduced."""

    def __init__(self, module: nn.Module, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.module, self.inputs, self.outputs = module, inputs, outputs


class Recorder:
    """Records calls of modules in the order in which they end."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        self.dtypes: set[torch.dtype] = set()
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def calls(self, documents: Documents | None = None) -> Iterator[list[Call]]:
        """Record all calls of modules inside the ``with``."""
        documents = documents or self.documents
        found: list[Call] = []
        reduced: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

        def small(values: Iterable[Tensor]) -> list[Tensor]:
            kept = []
            for value in values:
                key = (id(value), value._version)
                if key not in reduced:
                    tokens = per_token(value, documents)
                    if tokens is None:
                        continue
                    self.dtypes.add(value.dtype)
                    reduced[key] = (value if value.dim() < 2 else tokens[:0], reduce(tokens))
                kept.append(reduced[key][1])
            return kept

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not active:
                return
            reduced.clear()  # an id is unique only while its tensor lives
            outputs = small(tensors(output if not hasattr(output, "to_tuple") else dict(output)))
            if outputs:
                found.append(Call(module, small(tensors([args, kwargs])), outputs))

        active = True
        hook = register_module_forward_hook(keep, with_kwargs=True)
        try:
            yield found
        finally:
            active = False
            hook.remove()


def names_of(target: Any, calls: Iterable[Call]) -> dict[int, str]:
    """Return the qualified name of every called module; roots of a function's modules have the
    name of their class."""
    modules = {id(call.module): call.module for call in calls}
    if isinstance(target, nn.Module):
        return {id(module): name for name, module in target.named_modules()}
    inner = {id(part) for module in modules.values() for part in list(module.modules())[1:]}
    names: dict[int, str] = {}
    for module in modules.values():
        if id(module) not in inner:
            root = type(module).__name__
            for name, part in module.named_modules():
                names.setdefault(id(part), f"{root}.{name}" if name else root)
    return names


# ---- Kinds

_NAMES = (
    ("mtp", r"mtp|nextn|next_n|multi_?token"),
    ("convolution", r"conv"),
    (
        "recurrent_state",
        r"mamba|ssm|delta_?net|rwkv|recurren|rg_?lru|lstm|gru\b|retnet|retention|hgrn|\bgla\b|kda"
        r"|xlstm|\bs4|hyena|linear_?att|lightning|mixer",
    ),
    ("attention_mask", r"att"),
    ("expert_capacity", r"moe|expert|router|gate\b|sparse"),
    ("row_statistics", r"norm|scale|quant|linear"),
)


def kind_of(module: nn.Module | None, name: str, *, alone: bool) -> str:
    """Return the kind of a leak that begins in a module.

    Args:
        alone: the document differs from itself alone, without a change of another document.
    """
    words = f"{type(module).__name__} {name.rpartition('.')[2]}".lower()
    if alone and re.search(r"rotary|rope|embed|position|wpe", words):
        return "position_ids"
    for kind, pattern in _NAMES:
        if re.search(pattern, words):
            return kind
    children = " ".join(name for name, _ in module.named_modules()).lower() if module else ""
    for kind, pattern in (
        ("attention_mask", r"q_proj|qkv|query|attn|attention"),
        ("expert_capacity", r"expert|router"),
        ("recurrent_state", r"a_log|dt_|x_proj"),
    ):
        if re.search(pattern, children):
            return kind
    return "row_statistics" if module is not None and not children.strip() else "attention_mask"
