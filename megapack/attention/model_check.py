"""Check of an architecture at start: does it train packed rows as it trains single documents?

``check_architecture`` builds a tiny model of the architecture with random weights, runs a row of
two documents with the attention of the run, and checks that

1. a document's last token changes only its own output: no document sees another, and no token sees
   the future;
2. logits and gradients equal those of the single documents under transformers' ``eager`` attention,
   with all windows, chunks, soft caps, position biases and sinks;
3. the loss that the run computes, and its gradients, equal the architecture's own training loss of
   the row, ``model(labels=...).loss``, with load-balancing losses, z-losses, factors on logits and
   biases of the head;
4. with ``trees``, a prefix and two branches give the logits and gradients of two sequences, and no
   branch changes the other one;
5. no document depends on the length of others in its row (RoPE that changes at a threshold):

       numbers in the configuration     original_max_position_embeddings 4096, max_... 131072
       changed to numbers between 23    27, 33 (the row has documents of 37 and 23 tokens)
       and 37
       logits of the row                must equal those of each document alone
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.utils import logging

from megapack.attention.tiny_model import (
    LENGTHS,
    RULES,
    VOCABULARY,
    WINDOW,
    Row,
    Trace,
    branches,
    concatenate_traces,
    difference,
    plain_arguments,
    randomize,
    tiny_configuration,
    trace,
)
from megapack.attention.transformers_interface import add_segment_numbers
from megapack.errors import ConfigError

BETWEEN = range(LENGTHS[1] + 1, LENGTHS[0])  # a threshold here separates the two documents
LONG = 192  # a length above any number that a model computes from several moved thresholds
REFERENCE = "eager"
MOST_PARAMETERS = 100_000_000  # larger models would take too long

# In standard deviations of the compared outputs. Half precision rounds every product. An output
# that must not change at all is rounded almost the same way in both runs, so its limit is stricter.
_TOLERANCE = {torch.float32: 0.03, torch.float16: 0.05, torch.bfloat16: 0.15}
_STRICT = {torch.float32: 1e-3, torch.float16: 0.005, torch.bfloat16: 0.02}

Build: TypeAlias = Callable[[Any, str], Any]
Loss: TypeAlias = Callable[[Any, Row], Tensor]


@dataclass(frozen=True, kw_only=True)
class _Run:
    attention: str
    build: Build
    device: torch.device
    dtype: torch.dtype
    loss: Loss | None
    longest: int | None
    trees: bool = False


_OTHER_LOGITS = "logits of a row differ from those of its documents run one by one"
_IN_A_TREE = "in a tree, "


@dataclass(frozen=True, kw_only=True)
class _Finding:
    what: str
    difference: float
    module: str | None = None  # None: the loss, which belongs to no layer
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
    trees: bool = False,
) -> None:
    """Raise ConfigError if a model mixes documents, attends to later tokens or drops part of its
    attention. The error names the architecture, the layer and the difference.

    Args:
        attention: the ``attn_implementation`` of the run.
        build: builds a float32 model from a configuration and an ``attn_implementation``.
        loss: returns the training loss of a row times its labels, as the run computes it; None: the
            run uses the architecture's own loss.
        longest: largest number of positions of a document or of padding. Position thresholds above
            it are not checked (with 0, none is). None: unknown; all are checked.
        trees: also check packed prefix trees, which recurrent layers cannot compute.
    """
    # On a CPU, half precision runs the same code with more noise.
    dtype = torch.float32 if device.type == "cpu" else dtype
    run = _Run(
        attention=attention,
        build=build,
        device=device,
        dtype=dtype,
        loss=loss,
        longest=longest,
        trees=trees,
    )
    subject = f"architecture {configuration.model_type!r} with attention {attention!r}"
    remedy = "choose another attention or architecture, or train it without packing"
    with isolated(device):
        try:
            tiny, reference = tiny_reference(configuration, build)
            model = build(copy.deepcopy(tiny), attention)  # raises if it does not support it
        except Exception as error:
            raise ConfigError(
                f"{subject}: building a tiny model for a check on packed rows fails: "
                f"{type(error).__name__}: {error}"
            ) from error
        try:
            finding = _first_finding(model, reference, run)
            if finding is not None and finding.startswith(_OTHER_LOGITS):
                # A position threshold may lie between the lengths of the two documents: move it.
                raised, reference = _raised(tiny, reference, build)
                finding = _first_finding(build(copy.deepcopy(raised), attention), reference, run)
        except Exception as error:
            raise ConfigError(
                f"{subject} fails on a row of two documents: {type(error).__name__}: {error}; "
                f"{remedy}"
            ) from error
        if finding is not None and finding.startswith(_IN_A_TREE):
            remedy = "train it without trees (attention: document)"
        if finding is not None:
            raise ConfigError(f"{subject}: {finding}; {remedy}")
        if longest != 0:
            _check_thresholds(configuration, tiny, run)


def check_positions(configuration: Any, *, attention: str, build: Build, longest: int) -> None:
    """Refuse a model in which a document depends on longer ones in its row; arguments as for
    ``check_architecture``, of which this is a part. ConfigError names the architecture, the field
    and its value. Returns at once if no threshold is below ``longest``."""
    cpu = torch.device("cpu")
    run = _Run(
        attention=attention,
        build=build,
        device=cpu,
        dtype=torch.float32,
        loss=None,
        longest=longest,
    )
    with isolated(cpu):
        try:
            tiny, _ = tiny_reference(configuration, build)
        except Exception:  # check_architecture reports it
            return
        _check_thresholds(configuration, tiny, run)


def _check_thresholds(configuration: Any, tiny: Any, run: _Run) -> None:
    text = configuration.get_text_config(decoder=True)
    paths = dict(_numbers(tiny.to_dict(), at_least=1)).keys()
    numbers = {path: value for path, value in _numbers(text.to_dict()) if path in paths}
    names = _thresholds(tiny, numbers, run)
    if not names:
        return
    values = {str(path[-1]): value for path, value in numbers.items()}
    fields = " and ".join(f"{name} ({values[name]})" for name in names)
    reach = "any number of" if run.longest is None else f"up to {run.longest}"
    raise ConfigError(
        f"architecture {configuration.model_type!r}: a document has different logits if its row "
        f"has one longer than {fields}, and documents or their padding have {reach} positions. "
        "Pack into buckets of at most that many tokens, or choose a rope_type such as yarn."
    )


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Restore the random state of the run afterwards; use one thread, because several threads would
    only wait for each other; keep transformers from warning about tiny configurations."""
    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(verbosity)


def tiny_reference(
    configuration: Any, build: Build, change: Callable[[Any], None] | None = None
) -> tuple[Any, Any]:
    """Return a tiny configuration, after ``change``, and its float32 model under ``eager``, on the
    CPU. Raises any exception of the model."""

    def made(exact: bool) -> tuple[Any, Any]:
        tiny = tiny_configuration(configuration, exact=exact)
        if change is not None:
            change(tiny)
        return tiny, _reference(tiny, build)

    try:
        return made(False)
    except Exception:  # some sizes or layers depend on others
        return made(True)


def _reference(tiny: Any, build: Build, length: int = LENGTHS[0]) -> Any:
    """Build a model on the CPU under ``eager`` and run one document. Raises any exception of the
    model."""
    size = sum(shape.numel() for shape in _shapes(tiny, build).values())
    if size > MOST_PARAMETERS:
        raise ConfigError(f"the tiny model has {size:,} parameters (limit {MOST_PARAMETERS:,})")
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

# Path to a number in a configuration: ("rope_parameters", "original_max_position_embeddings").
Path: TypeAlias = tuple[Any, ...]
Moves: TypeAlias = dict[Path, float]


def _thresholds(tiny: Any, numbers: Mapping[Path, float], run: _Run) -> tuple[str, ...]:
    """Return the names of fields that make a document depend on longer ones in its row.

    Sets every one of ``numbers``, the model's own, that may be a position threshold to a value
    between the lengths of two documents of a row; each document must keep the logits that it has
    alone. Any number may be a threshold if changing it changes no parameter's shape and the model
    still runs; a list of field names would be incomplete.
    """
    groups = _movable(tiny, run.build, _moves(numbers, run.longest))
    # Without the other numbers, those that remain get distinct values.
    again = _moves({path: numbers[path] for group in groups for path in group}, run.longest)
    if again and _runs(tiny, run.build, again):
        groups = again
    if not groups or not _depends_on_row(tiny, groups, run):
        return ()
    for group in groups:
        # Move the other thresholds out of reach, if the configuration's class accepts that.
        others = _moves({p: numbers[p] for g in groups for p in g if p not in group}, 0)
        others = _movable(tiny, run.build, others)
        base = _moved(tiny, others)
        if _runs(base, run.build, [group]) and _depends_on_row(base, [group], run):
            return (str(next(iter(group))[-1]),)
    return tuple(str(next(iter(group))[-1]) for group in groups)


def _raised(tiny: Any, reference: Any, build: Build) -> tuple[Any, Any]:
    """Move every position threshold beyond the length of the row."""
    numbers = dict(_numbers(tiny.to_dict()))
    kept = {path: value for path, value in numbers.items() if not _is_shrunk(path)}
    groups = _movable(tiny, build, _moves(kept, 0))
    if not groups:
        return tiny, reference
    raised = _moved(tiny, groups)
    return raised, _reference(raised, build)


def _movable(tiny: Any, build: Build, groups: Sequence[Moves]) -> list[Moves]:
    """Return the moves after which the model still runs and keeps its parameter shapes."""
    shapes = _shapes(tiny, build) if groups else {}

    def keeps_shapes(group: Moves) -> bool:
        try:
            return _shapes(_moved(tiny, [group]), build) == shapes
        except Exception:  # the configuration's class refuses the value
            return False

    kept = [group for group in groups if keeps_shapes(group)]
    if not kept or _runs(tiny, build, kept):
        return kept
    chosen: list[Moves] = []
    for group in kept:
        if _runs(tiny, build, [*chosen, group]):
            chosen.append(group)
    return chosen


def _runs(tiny: Any, build: Build, groups: Sequence[Moves] = (), length: int = LENGTHS[0]) -> bool:
    """Return whether the model runs a document after the moves; on the CPU, as a bad index would
    break a GPU."""
    try:
        _reference(_moved(tiny, groups) if groups else tiny, build, length)
    except Exception:  # the number is something else: the size of a buffer, a count of experts
        return False
    return True


def _depends_on_row(tiny: Any, groups: Sequence[Moves], run: _Run) -> bool:
    """Return whether logits of documents in a row differ from those of documents alone after the
    moves, with the run's attention."""
    tiny = _moved(tiny, groups)
    model = run.build(copy.deepcopy(tiny), run.attention).train()
    randomize(model)
    model = model.to(run.device)
    add_segment_numbers(model)
    rows = [LENGTHS, LENGTHS[::-1]]
    # Also run a row that is longer than any product of numbers that the model may compute, because
    # documents of the run may be so long.
    values = [value for group in groups for value in group.values()]
    crossed = [value for value in values if value in BETWEEN]
    long = LONG
    if run.longest is not None:
        long = min(LONG, LENGTHS[0] * run.longest // int(min(crossed, default=LONG)))
        if LENGTHS[0] in values:
            long = 0  # the run's longest documents just reach a threshold
    if long > LENGTHS[0] and _runs(tiny, run.build, length=long):
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


def _moves(numbers: Mapping[Path, float], longest: int | None) -> list[Moves]:
    """Return new values of numbers that may be thresholds, grouped by name, ascending.

    The order of the values, and of ``longest`` among them, does not change. So the longer document
    of the row crosses exactly the thresholds that documents of the run cross. With ``longest`` 0 it
    crosses none.
    """
    crossed = sorted({value for value in numbers.values() if longest is None or value < longest})
    if not crossed and longest:
        return []
    new: dict[float, int] = {longest: LENGTHS[0]} if longest else {}
    for i, value in enumerate(crossed):
        new[value] = BETWEEN[(2 * i + 1) * len(BETWEEN) // (2 * len(crossed))]
    groups: dict[tuple[float, str], Moves] = {}
    for path, value in numbers.items():
        # Thresholds that no document of the run reaches must be out of reach in the check, too.
        moved = new.get(value, value if value > LONG else LONG + value)
        if moved != value or value in new:
            groups.setdefault((value, str(path[-1])), {})[path] = type(value)(moved)
    return [groups[key] for key in sorted(groups)]


def _numbers(
    fields: Any, path: Path = (), at_least: float = WINDOW
) -> Iterator[tuple[Path, float]]:
    """Yield paths and values of finite numbers."""
    for key, value in fields.items() if isinstance(fields, dict) else enumerate(fields):
        if isinstance(value, dict | list):
            yield from _numbers(value, (*path, key), at_least)
        elif type(value) in (int, float) and at_least <= value < math.inf:
            yield (*path, key), value


def _is_shrunk(path: Path) -> bool:
    """Return whether a rule of ``RULES`` shrinks the number."""
    name = next((part for part in path[::-1] if isinstance(part, str)), "")
    return any(re.search(pattern, name) for pattern in RULES)


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
    """Compare the run's attention with ``eager`` on the same weights; None: they agree."""
    reference = copy.deepcopy(reference).to(run.device)
    model = model.to(run.device).train()
    model.load_state_dict(reference.state_dict())
    for parameter in model.parameters():  # but not buffers: RoPE frequencies stay exact
        parameter.data = parameter.data.to(run.dtype)
    for rounded, parameter in zip(model.parameters(), reference.parameters(), strict=True):
        parameter.data = rounded.data.float()
    add_segment_numbers(model)
    torch.manual_seed(0)
    draw = torch.randint(0, VOCABULARY - 8, (sum(LENGTHS),)).to(run.device)
    documents = torch.split(draw, list(LENGTHS))
    checks = _findings(model, reference, documents, run.loss, run.dtype)
    if run.trees:
        checks = itertools.chain(checks, _tree_findings(model, reference, documents, run.dtype))
    finding = next(filter(None, checks), None)
    if finding is None:
        return None
    where = "" if finding.module is None else f", first in {_layer(model, finding.module)}"
    return f"{finding.what}, by {finding.difference:.1e} {finding.unit}{where}"


def _findings(
    model: Any,
    reference: Any,
    documents: Sequence[Tensor],
    loss: Loss | None,
    dtype: torch.dtype,
) -> Iterator[_Finding | None]:
    """Yield one result per check; None: it passed."""
    row, tolerance = Row.of(documents), _TOLERANCE[dtype]
    traced = trace(model, row.arguments())
    # A document's last token must change no output but the one at its position.
    position = torch.arange(sum(LENGTHS))
    for number, (begin, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(LENGTHS)])):
        changed = [tokens.clone() for tokens in documents]
        changed[number][-1] = (changed[number][-1] + 1) % (VOCABULARY - 8)
        after = trace(model, Row.of(changed).arguments())
        inside = (position >= begin) & (position < end)
        for rows, what in (
            (inside & (position < end - 1), "a token changes earlier logits of its document"),
            (~inside, "a token changes logits of another document in its row"),
        ):
            yield _compare(_at(after, rows), _at(traced, rows), what, _STRICT[dtype])
    # Logits of the row must equal those of its documents under the reference.
    wanted = concatenate_traces(trace(reference, plain_arguments(tokens)) for tokens in documents)
    if not difference(traced[""], wanted[""]) <= tolerance:
        alone = concatenate_traces(
            trace(model, Row.of([tokens]).arguments()) for tokens in documents
        )
        what = f"logits differ from those of {REFERENCE!r} even for one document alone"
        yield _compare(alone, wanted, what, tolerance)
        yield _compare(traced, alone, _OTHER_LOGITS, tolerance)
    # So must the gradients.
    ours = _cross_entropy(model(**row.arguments()).logits, row.labels)
    alone_losses = [
        _cross_entropy(reference(**plain_arguments(tokens)).logits, Row.of([tokens]).labels)
        for tokens in documents
    ]
    theirs = torch.stack(alone_losses).sum()
    what = "gradients of a row differ from those of its documents run one by one"
    yield _compare_gradients(
        _gradients(model, ours), _gradients(reference, theirs), what, tolerance
    )
    if loss is None:
        return
    # Value and gradients of the run's loss must equal those of the architecture's own loss.
    count = int((row.labels >= 0).sum())
    labels = nn.functional.pad(row.labels[:, :-1], (1, 0), value=-100)  # the model shifts them
    ours, theirs = loss(model, row), model(labels=labels, **row.arguments()).loss * count
    error = abs(float(ours.detach()) - float(theirs.detach())) / count
    own = "the architecture's own training loss, model(labels=...).loss"
    if not error <= tolerance:
        what = (
            "megapack does not compute a part of the architecture's loss: the loss of a row "
            f"differs from {own}"
        )
        yield _Finding(what=what, difference=error, unit="per label")
    what = f"gradients of a row differ from those of {own}"
    yield _compare_gradients(_gradients(model, ours), _gradients(model, theirs), what, tolerance)


def _tree_findings(
    model: Any, reference: Any, documents: Sequence[Tensor], dtype: torch.dtype
) -> Iterator[_Finding | None]:
    """Yield one result per check of the first document as a prefix of two branches."""
    prefix, one = documents
    other = (one + 1) % (VOCABULARY - 8)
    arguments, rows = branches(prefix, one, other)
    traced = trace(model, arguments)
    changed = torch.cat([one[:-1], other[-1:]])
    after = trace(model, branches(prefix, changed, other)[0])
    kept = torch.arange(len(traced[""])) != len(prefix) + len(one) - 1
    what = f"{_IN_A_TREE}a token changes logits of another branch"
    yield _compare(_at(after, kept), _at(traced, kept), what, _STRICT[dtype])
    sequences = [torch.cat([prefix, branch]) for branch in (one, other)]
    wanted = concatenate_traces(trace(reference, plain_arguments(tokens)) for tokens in sequences)
    what = f"{_IN_A_TREE}logits of sequences differ from those of the sequences run one by one"
    yield _compare(_at(traced, rows), wanted, what, _TOLERANCE[dtype])
    labels = Row.of(sequences).labels
    ours = _cross_entropy(model(**arguments).logits[:, rows], labels)
    alone = [reference(**plain_arguments(tokens)).logits for tokens in sequences]
    theirs = _cross_entropy(torch.cat(alone, dim=1), labels)
    what = f"{_IN_A_TREE}gradients differ from those of the sequences run one by one"
    ours_of, theirs_of = _gradients(model, ours), _gradients(reference, theirs)
    yield _compare_gradients(ours_of, theirs_of, what, _TOLERANCE[dtype])


def _gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all parameters that the loss reaches, in float32."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g.float() for name, g in zip(named, grads, strict=True) if g is not None}


def _compare_gradients(
    ours: dict[str, Tensor], wanted: dict[str, Tensor], what: str, tolerance: float
) -> _Finding | None:
    """Find the parameter with the largest difference, relative to the gradient's norm."""
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
    """Compare logits; name the first module whose output differs too much."""
    logits = difference(ours[""], theirs[""])
    if logits <= tolerance:
        return None
    names = (name for name in ours if name in theirs)
    first = next(name for name in names if not difference(ours[name], theirs[name]) <= tolerance)
    return _Finding(what=what, difference=logits, module=first)


def _layer(model: Any, name: str) -> str:
    """Describe a module: its path, its class, and the kind of its layer."""
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
