"""Whether an architecture does what packed rows ask of it, tried before the first step.

``check_architecture`` is the check; ``tiny_configuration`` makes a tiny model of an architecture,
``Row`` a row of documents, ``trace`` what every module of a model makes of it.

A tiny model of the architecture, with random weights, gets one row of two documents, with the
attention of the run. It is right when

1. nothing but the last position of a document notices that its last token changed: no document
   sees another, and no token sees the future;
2. logits and gradients are those of the documents one by one under transformers' own ``eager``
   attention: windows, chunks, soft caps, position biases and sinks are applied;
3. the loss that the run computes, and its gradients, are the architecture's own training loss of
   the row, ``model(labels=...).loss``: with load-balancing losses, z-losses, factors on logits and
   biases of the head, all that an architecture adds when it is trained.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from megapack.attention.transformers_interface import (
    tell_recurrent_layers,
    varlen_arguments,
)
from megapack.errors import ConfigError

LENGTHS = (37, 23)  # of the documents: different, and longer than a tiny window or chunk
REFERENCE = "eager"
MOST_PARAMETERS = 100_000_000  # more would take longer to try than it should

# In deviations of what is compared. Half precision rounds every product; a position that must not
# notice anything is hardly rounded otherwise, so there the test is stricter.
_TOLERANCE = {torch.float32: 0.03, torch.float16: 0.05, torch.bfloat16: 0.15}
_STRICT = {torch.float32: 1e-3, torch.float16: 0.005, torch.bfloat16: 0.02}

# A tiny model: a transformers configuration is shrunk by the names of its fields. It has as many
# layers as it takes to have one of every kind, four heads of the model's own width, grouped as the
# model groups them, few experts, short windows. What was a multiple of the hidden size stays the
# same multiple of it.
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

# First match decides; the names are transformers' own. What matches nothing stays as it is.
_RULES = {
    r"dropout|pdrop|drop_rate|layerdrop|jitter": "off",
    r"(aux|z)_loss_coef": "on",  # so that it matters beside the loss of the labels
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
    """The configuration of a tiny model of the same architecture (of its text decoder).

    Args:
        configuration: of a transformers model.
        exact: as many layers as the model, for architectures whose layers refer to others, and a
            hidden size that is heads times their width, where the model's is (Helium relies on it).
        heads: of attention; no more than the model has.

    Raises:
        Exception: whatever the configuration's class says against the result.
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
            tiny[name] = shrink(name, _of_first(kept, value))
    tiny["use_cache"] = False
    return type(text).from_dict(tiny)


def _num_layers(fields: dict[str, Any], layers: int) -> int:
    """The shortest beginning of the layers that has one of every kind; 2 at least."""
    needed, shared = 2, False
    for name, value in fields.items():
        if _per_layer(name, value, layers):
            kinds = [repr(kind) for kind in value]
            if len(set(kinds)) < layers:  # else they are numbers of layers
                needed = max(needed, *(kinds.index(kind) + 1 for kind in kinds))
        elif isinstance(value, list) and value and isinstance(value[0], str):
            needed = max(needed, len(value))  # kinds that are repeated
        elif type(value) is int and _PERIOD.search(name) and value < layers:
            needed = max(needed, value + 1)
        elif value and name.endswith("shared_layers"):
            shared = True
    return min(needed * (1 + shared), layers)


def _per_layer(name: str, value: Any, layers: int) -> bool:
    """Whether a field says something of every layer: a list, or a pattern of letters."""
    listed = isinstance(value, list) or (isinstance(value, str) and "pattern" in name)
    return listed and len(value) == layers


def _of_first(kept: int, value: Any) -> Any:
    """A mapping from numbers of layers, of which the first ones are kept; else the value."""
    numbered = isinstance(value, dict) and all(str(key).isdigit() for key in value)
    return {k: v for k, v in value.items() if int(k) < kept} if numbered else value


class _Shrink:
    """The value of a field in the tiny configuration."""

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
        rule = next((rule for pattern, rule in _RULES.items() if re.search(pattern, name)), None)
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
            # Else up to a multiple of 16, which every kernel takes.
            return int(exact) if exact.denominator == 1 else -(-int(exact) // 16) * 16
        return min(value, _LARGEST[rule])


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Weights with which every layer matters: initial ones would hide what attention does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.add_(noise.to(parameter.device, parameter.dtype))


# What every module gave, float32 ``[T, ...]`` by name, in the order in which they finished; the
# last is "", the logits.
Trace: TypeAlias = dict[str, Tensor]


class Row(NamedTuple):
    """Documents in one row, as a model in training gets them."""

    tokens: Tensor
    """``[1, T]`` int64."""
    labels: Tensor
    """``[1, T]`` int64: the next token of the same document, -100 at its last."""
    position_ids: Tensor
    """``[1, T]`` int64, from 0 in every document."""
    cu_seqlens: Tensor
    """``[documents + 1]`` int32."""
    max_seqlen: int

    @staticmethod
    def of(documents: Sequence[Tensor]) -> Row:
        """``documents``: int64 ``[L]`` each, on one device."""
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
        """Arguments of a transformers model's forward."""
        segments = varlen_arguments(self.cu_seqlens, self.max_seqlen)
        return {"input_ids": self.tokens, "position_ids": self.position_ids, **segments}


def plain_arguments(tokens: Tensor) -> dict[str, Any]:
    """Arguments of the usual forward of one document ``[L]``."""
    return {"input_ids": tokens.unsqueeze(0), "use_cache": False}


def trace(model: Any, arguments: dict[str, Any]) -> Trace:
    """Run without gradients; see ``Trace``."""
    length = arguments["input_ids"].shape[1]
    found: Trace = {}

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        value = output[0] if isinstance(output, tuple) else output
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
            value = value[0] if value.shape[:2] == (1, length) else value
            if value.shape[0] == length:
                found.setdefault(name, value.detach().float())

    hooks = [m.register_forward_hook(partial(keep, n)) for n, m in model.named_modules() if n]
    try:
        with torch.no_grad():
            logits = model(**arguments).logits
    finally:
        for hook in hooks:
            hook.remove()
    return {**found, "": logits[0].float()}


def joined(traces: Iterable[Trace]) -> Trace:
    """Traces of single documents joined into the trace of one row."""
    listed = list(traces)
    names = [name for name in listed[0] if all(name in trace for trace in listed)]
    return {name: torch.cat([trace[name] for trace in listed]) for name in names}


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest, in standard deviations of ``theirs``."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float((ours - theirs).abs().max() / theirs.std().clamp(min=1e-6))


Build: TypeAlias = Callable[[Any, str], Any]
Loss: TypeAlias = Callable[[Any, Row], Tensor]


@dataclass(frozen=True, kw_only=True)
class _Finding:
    what: str
    difference: float
    module: str | None = None  # None: the loss, which is of no layer
    unit: str = "standard deviations"


def check_architecture(
    configuration: Any,
    *,
    attention: str,
    build: Build,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    loss: Loss | None = None,
) -> None:
    """Refuse a model that mixes documents, sees the future or drops part of its attention.

    Args:
        configuration: of the transformers model.
        attention: the ``attn_implementation`` of the run.
        build: makes a model in float32 from a configuration and an ``attn_implementation``.
        device, dtype: of the run.
        loss: the training loss of a row times its labels, as the run computes it; None: the run
            takes the architecture's own.

    Raises:
        ConfigError: naming the architecture, the layer and the difference.
    """
    # Half precision on a CPU is the same code, with more noise.
    dtype = torch.float32 if device.type == "cpu" else dtype
    subject = f"architecture {configuration.model_type!r} with attention {attention!r}"
    remedy = "choose another attention or architecture, or train it without packing"
    with apart(device):
        draw = torch.randint(0, VOCABULARY - 8, (sum(LENGTHS),)).to(device)
        documents = torch.split(draw, list(LENGTHS))
        try:
            model, reference = _models(configuration, attention, build, device, dtype)
        except Exception as error:
            raise ConfigError(
                f"{subject}: no tiny model to try packed rows on could be made of its "
                f"configuration: {type(error).__name__}: {error}"
            ) from error
        tell_recurrent_layers(model)
        try:
            findings = _findings(model, reference, documents, loss, dtype)
            found = next(filter(None, findings), None)
        except Exception as error:
            raise ConfigError(
                f"{subject} fails on a row of two documents: {type(error).__name__}: {error}; "
                f"{remedy}"
            ) from error
    if found is not None:
        where = "" if found.module is None else f", first in {_layer(model, found.module)}"
        raise ConfigError(
            f"{subject}: {found.what}, by {found.difference:.1e} {found.unit}{where}; {remedy}"
        )


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """The run's random state stays as it is; threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)


def _models(
    configuration: Any, attention: str, build: Build, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any]:
    """A tiny model with the run's attention, and the same weights in float32 under ``eager``."""
    try:
        tiny = tiny_configuration(configuration)
        reference = _reference(tiny, build, device)
    except Exception:  # sizes or layers that rely on others
        tiny = tiny_configuration(configuration, exact=True)
        reference = _reference(tiny, build, device)
    model = build(tiny, attention).to(device).train()
    model.load_state_dict(reference.state_dict())
    for parameter in model.parameters():  # not the buffers: RoPE's frequencies stay exact
        parameter.data = parameter.data.to(dtype)
    for rounded, parameter in zip(model.parameters(), reference.parameters(), strict=True):
        parameter.data = rounded.data.float()
    return model, reference


def _reference(tiny: Any, build: Build, device: torch.device) -> Any:
    with torch.device("meta"):
        size = sum(p.numel() for p in build(copy.deepcopy(tiny), REFERENCE).parameters())
    if size > MOST_PARAMETERS:
        raise ConfigError(f"shrunk it still has {size:,} parameters (limit {MOST_PARAMETERS:,})")
    model = build(copy.deepcopy(tiny), REFERENCE)
    randomize(model)
    model = model.to(device).train()
    with torch.no_grad():  # fails where the configuration is at fault
        model(**plain_arguments(torch.arange(4, device=device)))
    return model


def _findings(
    model: Any,
    reference: Any,
    documents: Sequence[Tensor],
    loss: Loss | None,
    dtype: torch.dtype,
) -> Iterator[_Finding | None]:
    """The questions one after the other; None where nothing is found."""
    row, tolerance = Row.of(documents), _TOLERANCE[dtype]
    traced = trace(model, row.arguments())
    # Whether a document's last token is noticed anywhere but at its own position.
    position = torch.arange(sum(LENGTHS))
    for number, (begin, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(LENGTHS)])):
        changed = [tokens.clone() for tokens in documents]
        changed[number][-1] = (changed[number][-1] + 1) % (VOCABULARY - 8)
        after = trace(model, Row.of(changed).arguments())
        inside = (position >= begin) & (position < end)
        for rows, what in (
            (inside & (position < end - 1), "a token changes logits before it in its document"),
            (~inside, "a token changes logits of another document in its row"),
        ):
            yield _compare(_at(after, rows), _at(traced, rows), what, _STRICT[dtype])
    # Whether logits of the row are those of its documents under the reference.
    wanted = joined(trace(reference, plain_arguments(tokens)) for tokens in documents)
    if not difference(traced[""], wanted[""]) <= tolerance:
        alone = joined(trace(model, Row.of([tokens]).arguments()) for tokens in documents)
        what = f"even one document alone has other logits than with {REFERENCE!r}"
        yield _compare(alone, wanted, what, tolerance)
        what = "a row has other logits than its documents one by one"
        yield _compare(traced, alone, what, tolerance)
    # Whether gradients are.
    ours = _cross_entropy(model(**row.arguments()).logits, row.labels)
    alone_losses = [
        _cross_entropy(reference(**plain_arguments(tokens)).logits, Row.of([tokens]).labels)
        for tokens in documents
    ]
    theirs = torch.stack(alone_losses).sum()
    what = "gradients of a row are not those of its documents one by one"
    yield _compare_gradients(
        _gradients(model, ours), _gradients(reference, theirs), what, tolerance
    )
    if loss is None:
        return
    # Whether the run's loss of the row is the architecture's own, by value and gradients.
    count = int((row.labels >= 0).sum())
    labels = nn.functional.pad(row.labels[:, :-1], (1, 0), value=-100)  # it shifts them itself
    ours, theirs = loss(model, row), model(labels=labels, **row.arguments()).loss * count
    error = abs(float(ours.detach()) - float(theirs.detach())) / count
    own = "the architecture's own training loss, model(labels=...).loss"
    if not error <= tolerance:
        what = f"the loss of a row is not {own}, of which a part is not computed here"
        yield _Finding(what=what, difference=error, unit="per label")
    what = f"gradients of a row are not those of {own}"
    yield _compare_gradients(_gradients(model, ours), _gradients(model, theirs), what, tolerance)


def _gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of all parameters that the loss reaches, in float32."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g.float() for name, g in zip(named, found, strict=True) if g is not None}


def _compare_gradients(
    ours: dict[str, Tensor], wanted: dict[str, Tensor], what: str, tolerance: float
) -> _Finding | None:
    """The largest difference of a parameter's, as a share of its norm."""
    floor = 1e-3 * max(float(grad.norm()) for grad in wanted.values())
    errors = {
        name: float((ours[name] - grad if name in ours else grad).norm())
        / max(float(grad.norm()), floor)
        for name, grad in wanted.items()
    }
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    if errors[worst] <= tolerance:
        return None
    module = worst.rpartition(".")[0]
    return _Finding(what=what, difference=errors[worst], module=module, unit="of their norm")


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[0].float(), labels[0], reduction="sum")


def _at(trace: Trace, rows: Tensor) -> Trace:
    return {name: value[rows.to(value.device)] for name, value in trace.items()}


def _compare(ours: Trace, theirs: Trace, what: str, tolerance: float) -> _Finding | None:
    """The difference of the logits, and the first module that has one as large."""
    found = difference(ours[""], theirs[""])
    if found <= tolerance:
        return None
    names = (name for name in ours if name in theirs)
    first = next(name for name in names if not difference(ours[name], theirs[name]) <= tolerance)
    return _Finding(what=what, difference=found, module=first)


def _layer(model: Any, name: str) -> str:
    """A module as a reader knows it: its path, class, and the kind of its layer."""
    while name and type(model.get_submodule(name)).__module__.startswith("torch."):
        name = name.rpartition(".")[0]
    if not name:
        return "the head"
    kinds = getattr(model.config, "layer_types", None) or []
    number = next((int(part) for part in name.split(".") if part.isdigit()), None)
    kind = type(model.get_submodule(name)).__name__
    if number is not None and number < len(kinds):
        kind = f"{kind}, {kinds[number]}"
    return f"{name} ({kind})"
