"""Comparison of a run with the checkpoint from which it resumes.

There is no generator state: any step is computed from (indices, program, step). So a state fits
every number of ranks, micro batch size and number of workers. A resume must refuse changes to
steps already taken, but only report changes to later steps.

- ``identity``, ``check_state``, ``resume_step``: everything that determines the order of samples.
- ``check_record``: a record, flat keys of everything else that determines a run.
- ``refuse_damage``: the errors of both for a state whose values do not have the saved types.

    check_state({..., "seed": 8}, {..., "seed": 7, "step": 100})
    # -> ResumeError: this run would not see the samples the checkpoint's run would have seen: seed
    #    was 7 and is 8. Restore the former configuration, or set allow_change=(seed) ...
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import xxhash

from megapack.config import check_known, to_dict
from megapack.data.program import skipped_pieces
from megapack.data.sources import SampleSource
from megapack.data.stage_settings import STAGE_FIELDS, Program, StageSettings, Weights, drawn_by
from megapack.data.steps import ScheduleConfig, order_named
from megapack.errors import MegapackError, ResumeError
from megapack.storage.columns import INTERPRETED

if TYPE_CHECKING:
    from megapack.data.dataset import PackedDataset

# Increment it when the same (index, configuration, step) yields different samples than before.
# 2: blends draw from their datasets by exact weights.
# 3: cost windows sort the samples of every source separately, within an epoch.
ORDER_VERSION = 3

# Settings that decide the draws of a stage, and those of the whole run.
_DRAWS = (*STAGE_FIELDS, "weights")
_WHOLE_RUN = (
    "order_version",
    *(field.name for field in fields(ScheduleConfig) if field.name not in STAGE_FIELDS),
    "indices",
)
# Settings of a stage and of the whole run that change what is learned from the same samples. A
# state contains them only if they are set.
_TRAINING = ("loss_weights", "fim", "fim_rates", "attention_window", "attention")
_LOSS = ("loss", "token_weights", "columns")
# Fields that may be missing from an identity.
OPTIONAL = (*_TRAINING, *_LOSS, "stages")
_RESHUFFLED = "from here on the epoch's samples come in a new order: some repeat, some are skipped"
_REWEIGHTED = "the same samples are drawn, but their losses are weighted differently"
_SKIPS = ("skip_steps", "skipped", "from_step")
_CONSEQUENCE = dict.fromkeys((*_WHOLE_RUN, *_DRAWS, *_SKIPS), _RESHUFFLED) | {
    "order_version": "another version of megapack orders samples differently; " + _RESHUFFLED,
    "tokens_per_step": "the step number follows from the tokens seen; a step draws other samples",
    "row_tokens": "draws hold a different number of samples; " + _RESHUFFLED,
    "cost_window": "samples of a window are grouped differently; " + _RESHUFFLED,
    "indices": "other data; the epoch counts so far are meaningless",
    "weights": "sources are taken in different proportions; " + _RESHUFFLED,
    "exclude": "other documents are masked than before",
    "loss_weights": _REWEIGHTED,
    "loss": _REWEIGHTED,
    "token_weights": _REWEIGHTED,
    "columns": "the same samples are drawn, with other columns",
    "fim": "the same samples are drawn, and fill-in-the-middle transforms documents differently",
    "fim_rates": "the same samples are drawn, with fill-in-the-middle at other rates",
    "attention_window": "the same samples are drawn, with a different attention window",
    "attention": "the same samples are drawn, but attention covers other ranges",
}
ORDER_FIELDS = frozenset(_CONSEQUENCE)
"""Names of all fields that determine the order of samples."""

State = Mapping[str, Any]
_Difference = tuple[str, str]  # the field, and both values in words


# ---- The order of samples ------------------------------------------------------------------------


def identity(program: Program, samples: SampleSource) -> dict[str, Any]:
    """Return everything that decides the order of samples: numbers, names, fingerprints (JSON).
    Settings of the first stage are next to those of the whole run; later stages, if there are any,
    are complete entries of ``stages``."""
    first, *later = (
        _stage_identity(stage, before, samples)
        for before, stage in zip((program[0], *program[:-1]), program, strict=True)
    )
    whole: dict[str, Any] = {
        "order_version": ORDER_VERSION,
        **to_dict(program[0].config),
        "num_cycles": first["num_cycles"],
        "indices": list(samples.fingerprints),
        "weights": first["weights"] if samples.mixture.run_tokens else samples.mixture.weights,
        **{name: first[name] for name in _TRAINING if name in first},
    }
    if samples.mixture.loss != "token_mean":
        whole["loss"] = samples.mixture.loss
    if any(samples.token_weights):
        whole["token_weights"] = samples.token_weights
    if samples.columns:
        whole["columns"] = {
            name: {**asdict(spec), "shape": list(spec.shape)}
            for name, spec in samples.columns.items()
        }
    return {**whole, "stages": later} if later else whole


def _stage_identity(
    stage: StageSettings, before: StageSettings, samples: SampleSource
) -> dict[str, Any]:
    pieces = skipped_pieces(stage)
    drawn_by_others = len(pieces) > 1 or (pieces and not pieces[0][0].same_draws(before))
    skipped = [[piece.begin, count, *drawn_by(piece.of_draws)] for piece, count in pieces]
    rates = _shortened(stage.fim_rates, stage.weights, 0.0)
    optional = {
        "loss_weights": _shortened(stage.loss_weights, stage.weights, 1.0),
        "fim": samples.fim.identity() if samples.fim is not None and rates else None,
        "fim_rates": rates,
        "attention_window": list(stage.window or ()),
        "attention": samples.attention if samples.attention in ("group", "tree") else None,
        "exclude": samples.exclusions.digests(stage.view, samples.names),
        # Redundant if the previous stage drew all skipped steps.
        "skipped": json.loads(json.dumps(skipped)) if drawn_by_others else None,
    }
    return {
        "from_step": stage.begin,
        "skip_steps": sum(count for _, count in pieces),
        **stage.of_draws,
        "num_cycles": stage.config.num_cycles or order_named(stage.config.order).num_cycles,
        "weights": list(stage.weights),
        **{name: value for name, value in optional.items() if value},
    }


def _shortened(values: Sequence[float] | None, weights: Weights, default: float) -> list[float]:
    """Return the values of drawn sources, up to the last one that differs from the default."""
    pairs = zip(values or (), weights, strict=False)
    of_drawn = [default if weight == 0 else value for value, weight in pairs]
    while of_drawn and of_drawn[-1] == default:
        of_drawn.pop()
    return of_drawn


def check_state(current: State, state: State, allow_change: Collection[str] = ()) -> list[str]:
    """Compare a saved state with the current order of samples.

    Args:
        current: ``Schedule.identity()`` of this run.
        state: ``Schedule.state_dict(step)`` of the run to continue.
        allow_change: names of fields that may differ before the step of the state.

    Returns a sentence with the consequence for every allowed difference, and a sentence for every
    stage that differs at or after the step of the state, where everything may differ.

    Raises:
        ResumeError: it is not a state, or another difference would change steps already taken: the
            message names all such fields with both values and the first step.
        ConfigError: allow_change names a field that does not exist.
    """
    check_known("checkpoint.allow_change", "field", allow_change, _CONSEQUENCE)
    step = int(state.get("step", -1))
    if step < 0 or "indices" not in state:
        raise ResumeError(
            f"this is not the state of a schedule (step {state.get('step')}, fields "
            f"{', '.join(state) or 'none'}): give what state_dict(step) returned"
        )
    num_taken = max(step, 1)  # compare the first stage also if no step was taken
    differing = list(_whole_run_changes(current, state, num_taken))
    changes = list(_stage_changes(current, state, num_taken))
    past = [change for change in changes if change[0] < num_taken]
    rewritten = dict(past[0][1]) if past else {}
    for _, differences in past[1:]:
        for name, text in differences:
            if name != "from_step":  # the first difference already names the step
                rewritten.setdefault(name, text)
    differing += rewritten.items()
    refused = [(name, text) for name, text in differing if name not in allow_change]
    if refused:
        names = ", ".join(name for name, _ in refused)
        remedy = "Restore the former configuration"
        if "order_version" in names:
            remedy = "Continue with the version of megapack that began the run"
        elif past and past[0][0] > 0:
            remedy += f" of the stages before step {step} (the first difference is at {past[0][0]})"
        elif past and len(refused) == len(rewritten):
            remedy += f", make the change a stage from step {step} on"
        same_samples = {name for name, _ in refused} <= {*_TRAINING, *_LOSS}
        differs = "train differently on" if same_samples else "not see"
        raise ResumeError(
            f"this run would {differs} the samples the checkpoint's run would have seen: "
            + "; ".join(text for _, text in refused)
            + f". {remedy}, or set allow_change=({names}) to continue with the change"
        )
    return [f"{text}: {_CONSEQUENCE[name]}" for name, text in differing] + [
        f"from step {begin} on {', '.join(text for _, text in differences)}"
        for begin, differences in changes
        if begin >= num_taken
    ]


def _whole_run_changes(current: State, state: State, step: int) -> Iterator[_Difference]:
    """Yield differences of the whole run; for sources, only of those drawn before ``step``."""
    stages = (*_all_stages(current), *_all_stages(state))
    num_drawn = max(len(stage["weights"]) for stage in stages if stage["from_step"] < step)
    for name in (*_WHOLE_RUN, *_LOSS):
        then, now = state.get(name), current.get(name)
        compared: tuple[Any, ...] = (then, now)
        if name in ("indices", "token_weights"):
            padded = (list(values or ()) + [None] * num_drawn for values in (then, now))
            compared = tuple(values[:num_drawn] for values in padded)
        if compared[0] != compared[1]:
            yield name, f"{name} was {then!r} and is {now!r}"


def _stage_changes(
    current: State, state: State, step: int
) -> Iterator[tuple[int, list[_Difference]]]:
    """Yield (step, differences) for every step at which new differences begin."""
    now, then = _all_stages(current), _all_stages(state)
    previous: list[_Difference] = []
    for begin in sorted({stage["from_step"] for stage in (*now, *then)} | {step}):
        new, old = ([s for s in stages if s["from_step"] <= begin][-1] for stages in (now, then))
        # Weights of the same proportions, for example, are equal.
        equal = _DRAWS if drawn_by(new) == drawn_by(old) else ()
        names = [name for name in new if new[name] != old[name] and name not in equal]
        if len(names) > 1 and "from_step" in names:
            names.remove("from_step")  # the stages differ anyway
        differences = [(name, f"{name} was {old[name]!r} and is {new[name]!r}") for name in names]
        if differences and differences != previous:
            yield begin, differences
        previous = differences


def _all_stages(state: State) -> list[dict[str, Any]]:
    """Return the stages of a state with all fields, without stages that change nothing. Weights end
    with the last source that is drawn: later sources may have been added since."""
    optional: dict[str, Any] = {"exclude": {}, "skipped": None, **dict.fromkeys(_TRAINING)}
    first: dict[str, Any] = {"from_step": 0, "skip_steps": 0}
    first |= {name: state.get(name) for name in (*_DRAWS, *_TRAINING)}
    first["weights"] = first["weights"] or [None] * len(state["indices"])
    stages: list[dict[str, Any]] = []
    for saved in (first, *state.get("stages", ())):
        weights = saved["weights"]
        num_drawn = max(i + 1 for i, weight in enumerate(weights) if weight != 0)
        stage = {**optional, **saved, "weights": list(weights[:num_drawn])}
        if stages and not stage["skip_steps"] and drawn_by(stages[-1]) == drawn_by(stage):
            others = [name for name in stage if name not in (*_SKIPS, *_DRAWS)]
            if all(stage[name] == stages[-1][name] for name in others):
                continue
        stages.append(stage)
    return stages


def resume_step(current: State, state: State, allow_change: Collection[str] = ()) -> int:
    """Return the step to continue with, after ``check_state``. If a different tokens_per_step is
    allowed for past steps, this is the first step that the tokens seen do not cover completely."""
    check_state(current, state, allow_change)
    step = int(state["step"])
    num_seen = _tokens(_all_stages(state), step)
    now = _all_stages(current)
    if _tokens(now, step) == num_seen:
        return step
    begin = [stage for stage in now if _tokens(now, stage["from_step"]) <= num_seen][-1]
    missing = num_seen - _tokens(now, begin["from_step"])
    return int(begin["from_step"]) + missing // int(begin["tokens_per_step"])


def _tokens(stages: Sequence[dict[str, Any]], step: int) -> int:
    ends = [stage["from_step"] for stage in stages[1:]] + [step]
    return sum(
        max(0, min(end, step) - stage["from_step"]) * int(stage["tokens_per_step"])
        for stage, end in zip(stages, ends, strict=True)
    )


# ---- Records: everything else that determines a run ----------------------------------------------

_READ_SHARDS = 64  # per source, in ``content_digests``
# Fields of a transformers configuration that name its origin, not the model.
_ORIGIN = (
    *("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype"),
    *("base_model_name_or_path", "revision", "peft_version", "inference_mode"),
)


def content_digests(data: PackedDataset) -> dict[str, list[Any]]:
    """Return digests of the bytes of tokens and columns that every source reads, from at most 64
    evenly spaced shards of each.

    A key consists of the source's number, the fingerprint of its samples and, for a column, its
    name. If two runs have a key in common, the bytes must be the same.
    """
    digests: dict[str, list[Any]] = {}
    names = (*INTERPRETED, *data.columns)
    sources = zip(data.samples.fingerprints, data.datasets, strict=True)
    for number, (fingerprint, source) in enumerate(sources):
        last, count = source.num_shards - 1, min(source.num_shards, _READ_SHARDS)
        shards = {round(i * last / max(1, count - 1)) for i in range(count)}
        key = f"{number} {fingerprint}"
        for shard in map(source.open, sorted(shards)):
            digests.setdefault(key, []).append(shard.content_digest)
            columns = source.open_columns(shard, names)
            for name in names:
                digest = columns[name].content_digest if name in columns else None
                digests.setdefault(f"{key} {name}", []).append(digest)
    return digests


def model_record(architecture: Any, prefix: str = "model.") -> dict[str, Any]:
    """Return every field of a configuration of transformers or PEFT under ``prefix``; JSON."""

    def plain(value: Any) -> Any:
        return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)

    tree = {name: v for name, v in architecture.to_dict().items() if name not in _ORIGIN}
    leaves: dict[str, Any] = json.loads(json.dumps(flatten(tree, prefix), default=plain))
    return leaves


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of a transformers tokenizer: vocabulary, rules, special tokens, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    content = [rules, special, getattr(tokenizer, "chat_template", None)]
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, default=str).encode())


def flatten(tree: State, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings under dotted keys."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def check_record(
    current: State,
    saved: State | None,
    allow_change: Collection[str] = (),
    *,
    is_branch: bool = False,
    option: str | None = "checkpoint.allow_change",
) -> list[str]:
    """Compare the record of a checkpoint with that of this run; return a sentence for every
    difference that is allowed.

    Args:
        saved: record of the checkpoint; None: none, which needs ``run`` in ``allow_change``.
        allow_change: keys, sections of keys, or last parts of keys that may differ.
        is_branch: the run starts from another run's checkpoint in order to differ from there on:
            only the model, the tokenizer and the data must be the same.
        option: name of ``allow_change`` in the message; None: the host has no such option.

    Raises ResumeError for other differences; it names each with both values.
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
        allow = f", or set {option}=[{','.join(refused)}] to continue with the new ones"
        raise ResumeError(
            f"this run would not continue the checkpoint's run: {'; '.join(refused.values())}. "
            f"Restore the former configuration or files{allow if option else ''}"
        )
    return changes


def rate_change(step: int, now: float, before: float) -> list[str]:
    """Return a sentence if the learning rate of a step is not that of the checkpoint's run."""
    if math.isclose(before, now, rel_tol=1e-9):
        return []
    return [
        f"the learning rate of step {step} is {now:.6g}, and the checkpoint's run would have had "
        f"{before:.6g}: the number of steps or the learning rate's settings changed"
    ]


def _content_difference(then: State, now: State) -> tuple[State, State]:
    """Return the sources that both runs have and whose bytes differ."""

    def differs(name: str) -> bool:
        if len(then[name]) != len(now[name]):
            return True
        for saved, present in zip(then[name], now[name], strict=True):
            if (saved is None) != (present is None):
                return True  # a column was added or removed
            digests = zip(saved or (), present or (), strict=True)
            # The second digest is missing if there was no meta file.
            if any(a != b for a, b in digests if a is not None and b is not None):
                return True
        return False

    differing = sorted(filter(differs, then.keys() & now.keys()))
    return {name: then[name] for name in differing}, {name: now[name] for name in differing}


@contextmanager
def refuse_damage(where: str) -> Iterator[None]:
    """Raise ResumeError if the block fails because a saved state has values of other types."""
    try:
        yield
    except MegapackError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ResumeError(
            f"{where} is damaged ({type(error).__name__}: {error}); restore it from a copy, or "
            "resume from another checkpoint"
        ) from error


def is_within(key: str, names: Collection[str]) -> bool:
    """Return whether a key, or a section that contains it, is among ``names``."""
    parts = key.split(".")
    return any(".".join(parts[: end + 1]) in names for end in range(len(parts)))
