"""Check of an architecture before the first step: does it train packed rows as single documents?

``check_architecture`` builds a tiny model of the architecture with random weights, gives it one
row of two documents with the attention of the run, and checks that

1. a document's last token changes no output but its own: no document sees another, and no token
   sees the future;
2. logits and gradients equal those of the single documents under transformers' own ``eager``
   attention: windows, chunks, soft caps, position biases and sinks are applied;
3. the loss that the run computes, and its gradients, equal the architecture's own training loss of
   the row, ``model(labels=...).loss``, with load-balancing losses, z-losses, factors on logits and
   biases of the head;
4. no document depends on how long others in its row are (RoPE that changes at a threshold):

       numbers of the configuration     original_max_position_embeddings 4096, max_... 131072
       moved between the documents      row of 37 + 23 tokens: 27, 33
       logits of the row                must be those of each document alone
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from megapack.attention.tiny_model import (
    LENGTHS,
    RULES,
    VOCABULARY,
    WINDOW,
    Row,
    Trace,
    concatenate_traces,
    difference,
    plain_arguments,
    randomize,
    tiny_configuration,
    trace,
)
from megapack.attention.transformers_interface import tell_recurrent_layers
from megapack.errors import ConfigError

BETWEEN = range(LENGTHS[1] + 1, LENGTHS[0])  # a threshold here separates the two documents
LONG = 192  # a document that exceeds what a model may compute of several thresholds
REFERENCE = "eager"
MOST_PARAMETERS = 100_000_000  # more would take longer to try than it should

# In deviations of what is compared. Half precision rounds every product; a position that must not
# notice anything is hardly rounded otherwise, so there the test is stricter.
_TOLERANCE = {torch.float32: 0.03, torch.float16: 0.05, torch.bfloat16: 0.15}
_STRICT = {torch.float32: 1e-3, torch.float16: 0.005, torch.bfloat16: 0.02}

# Fields with another known meaning: skipped, to save the time of trying them.
_NO_THRESHOLD = r"layers?$|^rope_theta$|head_dim$"

Build: TypeAlias = Callable[[Any, str], Any]
Loss: TypeAlias = Callable[[Any, Row], Tensor]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Arguments of ``check_architecture``."""

    attention: str
    build: Build
    device: torch.device
    dtype: torch.dtype
    loss: Loss | None
    longest: int | None


_OTHER_LOGITS = "a row has other logits than its documents one by one"


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
    longest: int | None = None,
) -> None:
    """Refuse a model that mixes documents, sees the future or drops part of its attention.

    Args:
        configuration: of the transformers model.
        attention: the ``attn_implementation`` of the run.
        build: makes a model in float32 from a configuration and an ``attn_implementation``.
        device, dtype: of the run.
        loss: the training loss of a row times its labels, as the run computes it; None: the run
            takes the architecture's own.
        longest: most positions of a document or of padding, tokens; None: any. Position thresholds
            of the configuration beyond it do not matter; with 0 none does.

    Raises:
        ConfigError: naming the architecture, the layer and the difference.
    """
    # Half precision on a CPU is the same code, with more noise.
    dtype = torch.float32 if device.type == "cpu" else dtype
    run = _Run(
        attention=attention, build=build, device=device, dtype=dtype, loss=loss, longest=longest
    )
    subject = f"architecture {configuration.model_type!r} with attention {attention!r}"
    remedy = "choose another attention or architecture, or train it without packing"
    with apart(device):
        try:
            tiny, reference = _tiny(configuration, build)
            model = build(copy.deepcopy(tiny), attention)  # raises if it does not offer this one
        except Exception as error:
            raise ConfigError(
                f"{subject}: no tiny model to try packed rows on could be made of its "
                f"configuration: {type(error).__name__}: {error}"
            ) from error
        try:
            found = _first_finding(model, reference, run)
            if found is not None and found.startswith(_OTHER_LOGITS):
                # A position threshold of the model may lie between the lengths of the documents.
                raised, reference = _raised(tiny, reference, build)
                found = _first_finding(build(copy.deepcopy(raised), attention), reference, run)
        except Exception as error:
            raise ConfigError(
                f"{subject} fails on a row of two documents: {type(error).__name__}: {error}; "
                f"{remedy}"
            ) from error
        if found is not None:
            raise ConfigError(f"{subject}: {found}; {remedy}")
        if longest != 0:
            _check_thresholds(configuration, tiny, run)


def check_positions(configuration: Any, *, attention: str, build: Build, longest: int) -> None:
    """Refuse a model in which a document depends on longer ones of its row; a part of
    ``check_architecture``, and nothing to do where no threshold is below ``longest``.

    Args:
        configuration, attention, build, longest: as of ``check_architecture``.

    Raises:
        ConfigError: naming the architecture, the field and its value.
    """
    cpu = torch.device("cpu")
    if not _moves(configuration.get_text_config(decoder=True), longest):
        return
    run = _Run(
        attention=attention,
        build=build,
        device=cpu,
        dtype=torch.float32,
        loss=None,
        longest=longest,
    )
    with apart(cpu):
        try:
            tiny, _ = _tiny(configuration, build)
        except Exception:  # check_architecture says why
            return
        _check_thresholds(configuration, tiny, run)


def _check_thresholds(configuration: Any, tiny: Any, run: _Run) -> None:
    names = _thresholds(tiny, run)
    if not names:
        return
    text = configuration.get_text_config(decoder=True)
    numbers = {str(path[-1]): value for path, value in _numbers(text.to_dict())}
    fields = " and ".join(f"{name} ({numbers.get(name, 'unknown')})" for name in names)
    reach = "any number of" if run.longest is None else f"up to {run.longest}"
    raise ConfigError(
        f"architecture {configuration.model_type!r}: a document has other logits next to one "
        f"longer than {fields} than alone, and documents or their padding have {reach} positions. "
        "Pack into buckets of at most so many tokens, or choose a rope_type that is the same at "
        "any length, such as yarn."
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


def _tiny(configuration: Any, build: Build) -> tuple[Any, Any]:
    """Make a tiny configuration and its model in float32 under ``eager``, on the CPU."""
    try:
        tiny = tiny_configuration(configuration)
        return tiny, _reference(tiny, build)
    except Exception:  # sizes or layers that rely on others
        tiny = tiny_configuration(configuration, exact=True)
        return tiny, _reference(tiny, build)


def _reference(tiny: Any, build: Build, length: int = LENGTHS[0]) -> Any:
    """Build a model on the CPU under ``eager`` and run one document on it.

    Raises:
        Exception: the configuration is at fault.
    """
    size = sum(shape.numel() for shape in _shapes(tiny, build).values())
    if size > MOST_PARAMETERS:
        raise ConfigError(f"shrunk it still has {size:,} parameters (limit {MOST_PARAMETERS:,})")
    model = build(copy.deepcopy(tiny), REFERENCE).train()
    randomize(model)
    with torch.no_grad():
        model(**plain_arguments(torch.arange(length) % VOCABULARY))
    return model


def _shapes(tiny: Any, build: Build) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = build(copy.deepcopy(tiny), REFERENCE)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


# ---- Position thresholds

# Keys of a number in a configuration: ("rope_parameters", "original_max_position_embeddings").
Path: TypeAlias = tuple[Any, ...]
Moves: TypeAlias = dict[Path, float]


def _thresholds(tiny: Any, run: _Run) -> tuple[str, ...]:
    """Find the fields beyond whose value a document depends on the others of its row.

    Every number that may be a position threshold moves between the lengths of the two documents of
    a row; then each must have the logits that it has alone. A number may be one if no parameter
    changes its shape with it, and the model still runs: a list of names would not be complete.
    """
    groups = _movable(tiny, run.build, _moves(tiny, run.longest))
    if not groups or not _depends_on_row(_moved(tiny, groups), run):
        return ()
    for group in groups:
        moved = _moved(tiny, [group])
        if _runs(moved, run.build) and _depends_on_row(moved, run):
            return (str(next(iter(group))[-1]),)
    return tuple(str(next(iter(group))[-1]) for group in groups)


def _raised(tiny: Any, reference: Any, build: Build) -> tuple[Any, Any]:
    """Move every position threshold beyond the reach of the row."""
    groups = _movable(tiny, build, _moves(tiny, 0))
    if not groups:
        return tiny, reference
    raised = _moved(tiny, groups)
    return raised, _reference(raised, build)


def _movable(tiny: Any, build: Build, groups: Sequence[Moves]) -> list[Moves]:
    """Return the moves with which the model still runs and keeps the shapes of its parameters."""
    shapes = _shapes(tiny, build) if groups else {}

    def keeps_shapes(group: Moves) -> bool:
        try:
            return _shapes(_moved(tiny, [group]), build) == shapes
        except Exception:  # the configuration's own validation
            return False

    kept = [group for group in groups if keeps_shapes(group)]
    if not kept or _runs(_moved(tiny, kept), build):
        return kept
    chosen: list[Moves] = []
    for group in kept:
        if _runs(_moved(tiny, [*chosen, group]), build):
            chosen.append(group)
    return chosen


def _runs(tiny: Any, build: Build, length: int = LENGTHS[0]) -> bool:
    """Try a document on the CPU: a position without an embedding would end a process on a GPU."""
    try:
        _reference(tiny, build, length)
    except Exception:  # a number is something else: the size of a buffer, a count of experts
        return False
    return True


def _depends_on_row(tiny: Any, run: _Run) -> bool:
    """Return whether documents have other logits in a row than alone, with the same attention."""
    model = run.build(copy.deepcopy(tiny), run.attention).train()
    randomize(model)
    model = model.to(run.device)
    tell_recurrent_layers(model)
    rows = [LENGTHS, LENGTHS[::-1]]
    # Cross what the model computes of several numbers (products), as documents of the run may.
    crossed = [value for _, value in _numbers(tiny.to_dict()) if value in BETWEEN]
    long = LONG
    if run.longest is not None:
        long = min(LONG, LENGTHS[0] * run.longest // int(min(crossed, default=LONG)))
        if LENGTHS[0] in dict(_numbers(tiny.to_dict())).values():
            long = 0  # a threshold that the run's longest documents just reach
    if long > LENGTHS[0] and _runs(tiny, run.build, long):
        rows.append((LENGTHS[1], long))
    for lengths in rows:
        tokens_of_row = torch.arange(sum(lengths), device=run.device) % VOCABULARY
        documents = torch.split(tokens_of_row, list(lengths))
        alone = concatenate_traces(
            trace(model, Row.of([tokens]).arguments()) for tokens in documents
        )
        together = trace(model, Row.of(documents).arguments())
        if not difference(together[""], alone[""]) <= _TOLERANCE[torch.float32]:
            return True
    return False


def _moves(tiny: Any, longest: int | None) -> list[Moves]:
    """New values of the numbers that may be thresholds, grouped by name, ascending.

    Values keep their order, also relative to ``longest``: documents of the run cross exactly the
    thresholds that the longer document of the row crosses. With 0, they cross none.
    """
    numbers = dict(_numbers(tiny.to_dict()))
    crossed = sorted({value for value in numbers.values() if longest is None or value < longest})
    if not crossed and longest:
        return []
    new: dict[float, int] = {longest: LENGTHS[0]} if longest else {}
    for i, value in enumerate(crossed):
        new[value] = BETWEEN[(2 * i + 1) * len(BETWEEN) // (2 * len(crossed))]
    groups: dict[tuple[float, str], Moves] = {}
    for path, value in numbers.items():
        # No document of the check may reach a threshold that none of the run reaches.
        moved = new.get(value, value if value > LONG else LONG + value)
        if moved != value or value in new:
            groups.setdefault((value, str(path[-1])), {})[path] = type(value)(moved)
    return [groups[key] for key in sorted(groups)]


def _numbers(fields: Any, path: Path = ()) -> Iterator[tuple[Path, float]]:
    """Yield the whole numbers from 8 on that no rule has shrunk, with their places."""
    for key, value in fields.items() if isinstance(fields, dict) else enumerate(fields):
        name = next((part for part in (key, *path[::-1]) if isinstance(part, str)), "")
        if isinstance(value, dict | list):
            yield from _numbers(value, (*path, key))
        elif (
            type(value) in (int, float)
            and value >= WINDOW
            and float(value).is_integer()
            and not any(re.search(pattern, name) for pattern in (*RULES, _NO_THRESHOLD))
        ):
            yield (*path, key), value


def _moved(tiny: Any, groups: Sequence[Moves]) -> Any:
    fields = tiny.to_dict()
    fields.pop("dtype", None)
    for path, value in itertools.chain.from_iterable(group.items() for group in groups):
        place = fields
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
    return type(tiny).from_dict(fields)


# ---- A row against its documents


def _first_finding(model: Any, reference: Any, run: _Run) -> str | None:
    """Compare a model with the run's attention with the same weights under ``eager``."""
    reference = copy.deepcopy(reference).to(run.device)
    model = model.to(run.device).train()
    model.load_state_dict(reference.state_dict())
    for parameter in model.parameters():  # not the buffers: RoPE's frequencies stay exact
        parameter.data = parameter.data.to(run.dtype)
    for rounded, parameter in zip(model.parameters(), reference.parameters(), strict=True):
        parameter.data = rounded.data.float()
    tell_recurrent_layers(model)
    torch.manual_seed(0)
    draw = torch.randint(0, VOCABULARY - 8, (sum(LENGTHS),)).to(run.device)
    documents = torch.split(draw, list(LENGTHS))
    found = next(filter(None, _findings(model, reference, documents, run.loss, run.dtype)), None)
    if found is None:
        return None
    where = "" if found.module is None else f", first in {_layer(model, found.module)}"
    return f"{found.what}, by {found.difference:.1e} {found.unit}{where}"


def _findings(
    model: Any,
    reference: Any,
    documents: Sequence[Tensor],
    loss: Loss | None,
    dtype: torch.dtype,
) -> Iterator[_Finding | None]:
    """Check one thing after the other; None: it is right."""
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
    wanted = concatenate_traces(trace(reference, plain_arguments(tokens)) for tokens in documents)
    if not difference(traced[""], wanted[""]) <= tolerance:
        alone = concatenate_traces(
            trace(model, Row.of([tokens]).arguments()) for tokens in documents
        )
        what = f"even one document alone has other logits than with {REFERENCE!r}"
        yield _compare(alone, wanted, what, tolerance)
        yield _compare(traced, alone, _OTHER_LOGITS, tolerance)
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
