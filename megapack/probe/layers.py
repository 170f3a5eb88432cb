"""Search for the module in which a leak begins: its inputs and outputs, a few numbers per token.

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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.compiler import is_compiling
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from megapack.probe.boundaries import Documents

WIDTH = 4  # numbers per token
TOGETHER = 64  # reduced tensors in one block of memory

# Outputs at unchanged tokens may differ by this fraction of the largest difference at changed
# tokens, because a mixture of experts may sum in another order, and half precision rounds.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}


def per_token(value: Tensor, documents: Documents) -> Tensor | None:
    """Return a tensor of numbers as ``(tokens, anything)``; None if it has no dimension of
    tokens."""
    if value.dim() == 0 or value.dtype == torch.bool:
        return None
    rows, row, shape = documents.rows, documents.row, value.shape
    if shape[:2] == (rows, row):
        value = value.flatten(0, 1)
    elif shape[:2] == (1, rows * row):
        value = value[0]
    elif is_shifted(value, documents):
        value = value.reshape(rows, row - 1, *shape[2 if shape[0] == rows else 1 :])
        value = torch.cat([value, value.new_zeros(rows, 1, *value.shape[2:])], dim=1).flatten(0, 1)
    elif shape[:2] == (row, rows):
        value = value.transpose(0, 1).flatten(0, 1)
    elif value.dim() == 4 and shape[0] == rows and shape[2] == row:
        value = value.transpose(1, 2).flatten(0, 1)
    elif value.dim() == 3 and shape[0] == rows and shape[2] == row:
        value = value.transpose(1, 2).flatten(0, 1)  # channels of a convolution
    elif shape[0] != rows * row:
        return None
    return value.reshape(rows * row, -1)


def is_shifted(value: Tensor, documents: Documents) -> bool:
    """Return whether a tensor lacks the last token of every row, as losses of next tokens do."""
    rows, before = documents.rows, documents.row - 1
    return value.shape[:2] == (rows, before) or value.shape[:1] == (rows * before,)


def reduce(value: Tensor) -> Tensor:
    """Return ``(tokens, at most WIDTH)`` float32: sums with random signs. Infinities, such as
    logits of unused ids, count as 0."""
    with torch.no_grad(), torch.autocast(value.device.type, enabled=False):
        value = value.detach()
        value = torch.where(value.isinf(), 0, value)
        width = value.shape[1]
        if width <= WIDTH:
            return value.float()
        return value.float() @ _signs(width, value.device)


@cache
def _signs(width: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return (torch.randint(0, 2, (width, WIDTH), generator=generator) * 2.0 - 1).to(device)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested lists, tuples, mappings, dataclasses and outputs with logits."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)
    elif is_dataclass(value):
        yield from tensors([getattr(value, field.name) for field in fields(value)])
    elif hasattr(value, "logits"):
        yield from tensors([part for part in vars(value).values() if isinstance(part, Tensor)])


class Call(NamedTuple):
    """One call of a module, and its tensors, reduced."""

    module: nn.Module
    number: int  # calls of the module before it in the pass
    inputs: list[Tensor]
    ids: list[Tensor]
    """Integer inputs: tokens, positions."""
    outputs: list[Tensor]


class Recorder:
    """Records calls of modules in the order in which they end; restores buffers at its exit."""

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        self.dtypes: set[torch.dtype] = set()
        self.last: Any = ()  # output of the module that ended last
        self.saved: dict[int, tuple[nn.Module, dict[str, Any], dict[str, Tensor]]] = {}

    def __enter__(self) -> None: ...

    def save(self, modules: Iterable[nn.Module]) -> None:
        """Keep copies of the buffers of modules that are not known yet."""
        for module in modules:
            if module._buffers and id(module) not in self.saved:
                buffers = {k: v for k, v in module._buffers.items() if v is not None}
                copies = {name: value.detach().clone() for name, value in buffers.items()}
                self.saved[id(module)] = (module, buffers, copies)

    def __exit__(self, *_: object) -> None:
        """Free the graph; restore the buffers of modules, such as token counts of experts."""
        self.last = ()
        for module, buffers, copies in self.saved.values():
            module._buffers.update(buffers)  # a pass may replace a buffer, or change it in place
            for name, copy in copies.items():
                if not torch.equal(buffers[name], copy):
                    buffers[name].data.copy_(copy)

    @contextmanager
    def calls(
        self, documents: Documents, gradients: Gradients | None = None
    ) -> Iterator[list[Call]]:
        """Record all calls of modules inside the ``with``."""
        found: list[Call] = []
        numbers: Counter[int] = Counter()
        free: list[Tensor] = []
        active = True

        def compact(value: Tensor) -> Tensor:
            """Copy a reduced tensor into a shared block. Thousands of small tensors between
            activations would fragment the memory that the next pass needs."""
            if not free:
                places = documents.rows * documents.row
                free.extend(torch.empty(TOGETHER, places, WIDTH, device=value.device).unbind())
            return free.pop()[:, : value.shape[1]].copy_(value)

        def save(module: nn.Module, inputs: Any) -> None:
            del inputs
            if not is_compiling():
                self.save([module])

        def small(value: Any, *, ids: bool = False) -> list[Tensor]:
            found = [x for x in tensors(value) if x.is_floating_point() != ids]
            self.dtypes.update(x.dtype for x in found)
            reduced = [per_token(x, documents) for x in found]
            return [compact(reduce(x)) for x in reduced if x is not None]

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if isinstance(module, nn.Conv1d):
                output = output[..., : documents.row]  # without what causal padding adds
            if active and not is_compiling() and (outputs := small(output)):
                values, number = [args, kwargs], numbers[id(module)]
                numbers[id(module)] += 1
                call = Call(module, number, small(values), small(values, ids=True), outputs)
                found.append(call)
                self.last = output
                if gradients is not None:
                    gradients.follow(module, [args, kwargs], output)

        hooks = [
            register_module_forward_pre_hook(save),
            register_module_forward_hook(keep, with_kwargs=True),
        ]
        try:
            yield found
        finally:
            active = False  # recomputation of checkpoints calls modules again
            for hook in hooks:
                hook.remove()
                # remove() leaves this entry, with which torch takes a slower path in every module.
                nn.modules.module._global_forward_hooks_with_kwargs.pop(hook.id, None)


@contextmanager
def rounding_errors(seed: int) -> Iterator[None]:
    """Add half a unit in the last place, up or down, to outputs of modules in half precision."""
    generator = torch.Generator().manual_seed(seed)

    def disturb(module: nn.Module, args: Any, output: Any) -> Any:
        del module, args
        if not isinstance(output, Tensor) or output.dtype not in (torch.bfloat16, torch.float16):
            return None
        sign = torch.randint(0, 2, output.shape, generator=generator).to(output.device) * 2 - 1
        return (output.float() * (1 + sign * torch.finfo(output.dtype).eps / 2)).to(output.dtype)

    hook = register_module_forward_hook(disturb)
    try:
        yield
    finally:
        hook.remove()


class Gradients:
    """Graph of a pass: tensors that come from ids alone, and inputs and outputs of all modules.

    A module mixes documents in its backward pass first if gradients leak at its inputs and not at
    its outputs.
    """

    def __init__(self, documents: Documents) -> None:
        self.documents = documents
        self.leaves: list[Tensor] = []
        # Edges, not tensors, which a training step would free.
        self.calls: list[tuple[nn.Module, list[GradientEdge], list[GradientEdge]]] = []

    def follow(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Record a call; tensors computed from ids alone become leaves."""
        float_inputs, float_outputs = self._floats(inputs), self._floats(outputs)
        if not float_inputs:
            self.leaves += [
                value.requires_grad_() for value in float_outputs if not value.is_inference()
            ]
        first, last = (
            [get_gradient_edge(x) for x in values if x.requires_grad and not x.is_inference()]
            for values in (float_inputs, float_outputs)
        )
        self.calls.append((module, first, last))

    def _floats(self, values: Any) -> list[Tensor]:
        floats = [x for x in tensors(values) if x.is_floating_point()]
        return [x for x in floats if per_token(x, self.documents) is not None]

    def sizes(self, outputs: list[Tensor], own: Tensor, inputs: Sequence[Any]) -> list[Tensor]:
        """Return for every input the gradient of the outputs at ``own`` tokens, its largest entry
        at every token, float32 (tokens,)."""
        generator = torch.Generator().manual_seed(0)
        total: Any = 0
        for value in outputs:
            weight = torch.randn(value.shape[1], generator=generator).to(value.device)
            total = total + (value.float() @ weight)[own.to(value.device)].sum()
        grads = torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)
        found = [None if grad is None else per_token(grad, self.documents) for grad in grads]
        zeros = torch.zeros(len(own))
        return [zeros if x is None else x.float().abs().amax(dim=1).cpu() for x in found]

    def origin(
        self, outputs: list[Tensor], own: Tensor, other: Tensor, allowed: float
    ) -> nn.Module | None:
        """Return the innermost module whose backward pass leaks first, from ``own`` tokens to
        ``other`` ones."""
        edges = [edge for _, *both in self.calls for edges in both for edge in edges]
        sizes = iter(self.sizes(outputs, own, edges))

        def leak(edges: list[GradientEdge]) -> bool:
            pairs = [(size * own, size * other) for size in islice(sizes, len(edges))]
            return any(bool(theirs.max() > allowed * ours.max()) for ours, theirs in pairs)

        leaks = [(module, leak(taken), leak(made)) for module, taken, made in self.calls]
        return next((module for module, taken, made in leaks if taken and not made), None)


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
    ("convolution", r"conv|shift|canon|fft"),
    (
        "recurrent_state",
        r"mamba|ssm|delta_?net|rwkv|recurren|rg_?lru|lstm|gru\b|retnet|retention|hgrn|\bgla\b|kda"
        r"|xlstm|\bs4|hyena|linear_?att|lightning|mixer",
    ),
    ("attention_mask", r"att"),
    ("expert_capacity", r"moe|expert|router|gate\b|sparse"),
    ("row_statistics", r"norm|scale|quant|linear"),
)
_CHILDREN = (
    ("attention_mask", r"q_proj|qkv|query|attn|attention"),
    ("expert_capacity", r"expert|router"),
    ("recurrent_state", r"a_log|dt_|x_proj"),
)


def kind_of(
    call: Call | None,
    name: str,
    *,
    alone: bool = False,
    at_end: bool = False,
    local: bool = False,
    scaled: bool = False,
    losses: bool = False,
) -> str:
    """Return the kind of a leak that begins in a call of a module.

    Args:
        call: None: no module leaks, so the loss does, or the target has no modules.
        name: qualified name.
        alone: the document differs from itself alone; no change of another document shows.
        at_end: only last tokens of documents change.
        local: only the first tokens of documents change.
        scaled: all outputs of the document change by one factor.
        losses: the target returns losses.
    """
    if scaled:
        return "row_statistics"
    if call is None and losses:
        return "loss_mask" if at_end else "row_statistics"
    if call is None:
        return "position_ids" if alone else "attention_mask"
    words = f"{type(call.module).__name__} {name.rpartition('.')[2]}".lower()
    if alone and re.search(r"rotary|rope|embed|position|wpe", words):
        return "position_ids"
    if at_end and re.search(_NAMES[0][1], name.lower()):
        return "mtp"
    if call.outputs[0].shape[1] == 1:  # losses
        return "loss_mask" if at_end else "row_statistics"
    children = " ".join(name for name, _ in call.module.named_modules()).lower()
    for kinds, text in ((_NAMES, words), (_CHILDREN, children)):
        for kind, pattern in kinds:
            if re.search(pattern, text):
                # Tokens of other documents have no effect: the mask or the positions depend on
                # places or lengths.
                return "position_ids" if alone and kind == "attention_mask" else kind
    if local:
        return "convolution"
    # A module that computes token by token can leak only through a statistic.
    if not children.strip() or re.search(r"mlp|ffn|feed_?forward", words):
        return "row_statistics"
    return "attention_mask"


# ---- Comparisons of outputs


def largest_change(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the largest difference of every token, (tokens,)."""
    return (ours - theirs).masked_fill(ours == theirs, 0).abs().amax(dim=1)


def largest(difference: Tensor, where: Tensor) -> float:
    """Return the largest entry at ``where``, or 0 without entries."""
    return float(difference[where].max()) if len(difference) and bool(where.any()) else 0.0


def differ(
    ours: Sequence[Tensor], row: Sequence[Tensor], *, places: Tensor, allowed: float
) -> bool:
    """Return whether outputs differ from those at ``places`` of a row by more than is allowed."""
    return any(
        float((a.cpu() - b.cpu()[places]).abs().max()) > allowed * float(b.abs().max())
        for a, b in zip(ours, row, strict=False)
    )


def scaled(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether outputs differ by one factor, as after a division by the row's length."""
    a, b = (torch.cat([x.cpu().flatten() for x in values]) for values in (ours, theirs))
    return float((a - (a @ b) / (b @ b) * b).norm()) < 0.01 * float((a - b).norm())
