"""Whether an architecture does what packed rows ask of it, tried before the first step.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megapack.attention.tiny import VOCABULARY, randomize, tiny_configuration
from megapack.attention.trace import Row, Trace, difference, joined, plain_arguments, trace
from megapack.errors import ConfigError

__all__ = ["apart", "check_architecture"]

LENGTHS = (37, 23)  # different, and longer than a tiny window or chunk
REFERENCE = "eager"
MOST_PARAMETERS = 100_000_000  # more would take longer to try than it should

# In deviations of what is compared. Half precision rounds every product; a position that must not
# notice anything is hardly rounded otherwise, so there the test is stricter.
_TOLERANCE = {torch.float32: 0.03, torch.float16: 0.05, torch.bfloat16: 0.15}
_STRICT = {torch.float32: 1e-3, torch.float16: 0.005, torch.bfloat16: 0.02}

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
        documents = list(torch.split(draw, list(LENGTHS)))
        try:
            model, reference = _models(configuration, attention, build, device, dtype)
        except Exception as error:
            raise ConfigError(
                f"{subject}: no tiny model to try packed rows on could be made of its "
                f"configuration: {type(error).__name__}: {error}"
            ) from error
        try:
            found = _notices(model, documents, _STRICT[dtype])
            found = found or _differs(model, reference, documents, _TOLERANCE[dtype])
            found = found or _learns_else(model, reference, documents, _TOLERANCE[dtype])
            if loss is not None:
                found = found or _loses_else(model, documents, loss, _TOLERANCE[dtype])
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
    with torch.no_grad():
        model(
            **plain_arguments(torch.arange(4, device=device))
        )  # fails where the configuration is at fault
    return model


def _notices(model: Any, documents: list[Tensor], tolerance: float) -> _Finding | None:
    """Whether a document's last token is noticed anywhere but at its own position."""
    before = trace(model, Row.of(documents).arguments())
    position = torch.arange(sum(LENGTHS))
    for number, (begin, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(LENGTHS)])):
        changed = [tokens.clone() for tokens in documents]
        changed[number][-1] = (changed[number][-1] + 1) % (VOCABULARY - 8)
        after = trace(model, Row.of(changed).arguments())
        inside = (position >= begin) & (position < end)
        for which, what in (
            (inside & (position < end - 1), "a token changes logits before it in its document"),
            (~inside, "a token changes logits of another document in its row"),
        ):
            rows = which.nonzero().flatten()
            if found := _compare(_at(after, rows), _at(before, rows), what, tolerance):
                return found
    return None


def _differs(
    model: Any, reference: Any, documents: list[Tensor], tolerance: float
) -> _Finding | None:
    """Whether logits of the row are not those of its documents under the reference."""
    row = trace(model, Row.of(documents).arguments())
    wanted = joined(trace(reference, plain_arguments(tokens)) for tokens in documents)
    if difference(row[""], wanted[""]) <= tolerance:
        return None
    alone = joined(trace(model, Row.of([tokens]).arguments()) for tokens in documents)
    what = f"even one document alone has other logits than with {REFERENCE!r}"
    return _compare(alone, wanted, what, tolerance) or _compare(
        row, alone, "a row has other logits than its documents one by one", tolerance
    )


def _learns_else(
    model: Any, reference: Any, documents: list[Tensor], tolerance: float
) -> _Finding | None:
    """Whether gradients of the row are not those of its documents under the reference."""
    row = Row.of(documents)
    ours = _cross_entropy(model(**row.arguments()).logits, row.labels)
    theirs = torch.stack(
        [
            _cross_entropy(reference(**plain_arguments(tokens)).logits, Row.of([tokens]).labels)
            for tokens in documents
        ]
    ).sum()
    what = "gradients of a row are not those of its documents one by one"
    return _compare_gradients(
        _gradients(model, ours), _gradients(reference, theirs), what, tolerance
    )


def _loses_else(
    model: Any, documents: list[Tensor], loss: Loss, tolerance: float
) -> _Finding | None:
    """Whether the run's loss of a row is not the architecture's own, by value and gradients."""
    row = Row.of(documents)
    count = int((row.labels >= 0).sum())
    labels = nn.functional.pad(row.labels[:, :-1], (1, 0), value=-100)  # it shifts them itself
    ours, theirs = loss(model, row), model(labels=labels, **row.arguments()).loss * count
    error = abs(float(ours.detach()) - float(theirs.detach())) / count
    own = "the architecture's own training loss, model(labels=...).loss"
    if not error <= tolerance:
        what = f"the loss of a row is not {own}, of which a part is not computed here"
        return _Finding(what=what, difference=error, unit="per label")
    what = f"gradients of a row are not those of {own}"
    return _compare_gradients(_gradients(model, ours), _gradients(model, theirs), what, tolerance)


def _gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Of every parameter that the loss reaches, in float32."""
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
