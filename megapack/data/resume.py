"""What a checkpoint keeps of the data: a step number and the program of the run.

There is no generator state: any step is computed from (indices, program, step). So a state fits
every number of ranks, micro batch size and number of workers. All a resume has to do is to refuse a
program that rewrites what was done, and to say what another one changes from now on.

- ``identity``: everything that decides the order of samples, as JSON.
- ``check_state``, ``resume_step``: a saved state against the run that is to go on from it.

    check_state({..., "seed": 8}, {..., "seed": 7, "step": 100})
    # -> ResumeError: this run would not see the samples the checkpoint's run would have seen: seed
    #    was 7 and is 8. Restore the former configuration, or allow_change=(seed) to go on ...
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megapack.config import check_known, to_dict
from megapack.data.program import skipped_pieces
from megapack.data.sources import SampleSource
from megapack.data.stage_settings import STAGE_FIELDS, Program, StageSettings, Weights, drawn_by
from megapack.data.steps import ScheduleConfig, order_named
from megapack.errors import ResumeError

if TYPE_CHECKING:
    from megapack.data.dataset import PackedDataset

# Raised whenever the same (index, configuration, step) would give other samples than before.
# 2: blends take from their datasets by exact weights.
# 3: windows of cost order the samples of every source by themselves, inside an epoch.
ORDER_VERSION = 3

# What a stage can change, and the rest. Those of training are not of the order of samples, and
# written only where there are some.
_STAGE = (*STAGE_FIELDS, "weights")
_TRAINING = ("loss_weights", "fim", "fim_rates", "attention_window", "attention")
_WHOLE_RUN = (
    "order_version",
    *(field.name for field in fields(ScheduleConfig) if field.name not in STAGE_FIELDS),
    "indices",
)
# Of the whole run, written only where there are some, and not of the order of samples either.
_OF_LOSS = ("loss", "token_weights")
# What an identity may lack.
OPTIONAL = (*_TRAINING, *_OF_LOSS, "stages")
_RESHUFFLED = "from here on the samples of the epoch come in another order: some again, some not"
_SKIPS = ("skip_steps", "skipped", "from_step")
_CONSEQUENCE = dict.fromkeys((*_WHOLE_RUN, *_STAGE, *_SKIPS), _RESHUFFLED) | {
    "order_version": "another version of megapack orders samples differently; " + _RESHUFFLED,
    "tokens_per_step": "the step number is converted by tokens seen; a step draws other samples",
    "row_tokens": "draws hold another number of samples; " + _RESHUFFLED,
    "cost_window": "samples of a window are grouped differently; " + _RESHUFFLED,
    "indices": "other data; the epochs counted so far no longer mean anything",
    "weights": "sources are taken in other proportions; " + _RESHUFFLED,
    "exclude": "documents are masked that were not, or seen that were masked",
    "loss_weights": "the same samples are drawn, and their losses count otherwise",
    "loss": "the same samples are drawn, and their losses count otherwise",
    "token_weights": "the same samples are drawn, and their losses count otherwise",
    "fim": "the same samples are drawn, and their documents are turned round otherwise",
    "fim_rates": "the same samples are drawn, and other shares of their documents turned round",
    "attention_window": "the same samples are drawn, and attention in them reaches as far as now",
    "attention": "the same samples are drawn, and documents of a group see each other, or no more",
}

_READ_SHARDS = 64  # of a source, by ``content_digests``
ORDER_FIELDS = frozenset(_CONSEQUENCE)
"""Names of all fields that decide the order of samples."""

State = Mapping[str, Any]
_Difference = tuple[str, str]  # the field, and both values in words


def identity(program: Program, samples: SampleSource) -> dict[str, Any]:
    """Everything that decides the order of samples: numbers, names and fingerprints (JSON).

    The first stage's settings stand beside those of the whole run; the later ones in ``stages``,
    each in full, if there are any.
    """
    first, *later = (
        _plain(stage, before, samples)
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
    return {**whole, "stages": later} if later else whole


def content_digests(data: PackedDataset) -> dict[str, list[Any]]:
    """Return digests of the bytes that every source reads: tokens, labels, loss weights.

    The keys are the source's number and the fingerprint of its samples: ``check_state`` compares
    which samples a run has, and a source with the same samples must have the same bytes. Of a
    source with more than 64 shards, 64 are read, evenly spaced.
    """
    digests: dict[str, list[Any]] = {}
    sources = zip(data.samples.fingerprints, data.datasets, strict=True)
    for number, (fingerprint, source) in enumerate(sources):
        last, count = source.num_shards - 1, min(source.num_shards, _READ_SHARDS)
        shards = {round(i * last / max(1, count - 1)) for i in range(count)}
        digests[f"{number} {fingerprint}"] = [
            None if file is None else file.content_digest
            for shard in sorted(shards)
            for file in source.open(shard)
        ]
    return digests


def _plain(stage: StageSettings, before: StageSettings, samples: SampleSource) -> dict[str, Any]:
    pieces = skipped_pieces(stage)
    others = len(pieces) > 1 or (pieces and not pieces[0][0].same_draws(before))
    skipped = [[piece.begin, count, *drawn_by(piece.of_draws)] for piece, count in pieces]
    rates = _of_drawn(stage.fim_rates, stage.weights, 0.0)
    optional = {
        "loss_weights": _of_drawn(stage.loss_weights, stage.weights, 1.0),
        "fim": samples.fim.identity() if samples.fim is not None and rates else None,
        "fim_rates": rates,
        "attention_window": list(stage.window or ()),
        "attention": "group" if samples.attention == "group" else None,
        "exclude": samples.exclusions.digests(stage.num_lists, samples.names),
        # Only where others than the stage before drew them.
        "skipped": json.loads(json.dumps(skipped)) if others else None,
    }
    return {
        "from_step": stage.begin,
        "skip_steps": sum(count for _, count in pieces),
        **stage.of_draws,
        "num_cycles": stage.config.num_cycles or order_named(stage.config.order).num_cycles,
        "weights": list(stage.weights),
        **{name: value for name, value in optional.items() if value},
    }


def _of_drawn(values: Sequence[float] | None, weights: Weights, usual: float) -> list[float]:
    """Of what is drawn, up to the last that is not as usual."""
    pairs = zip(values or (), weights, strict=False)
    found = [usual if weight == 0 else value for value, weight in pairs]
    while found and found[-1] == usual:
        found.pop()
    return found


def check_state(current: State, state: State, allow_change: Collection[str] = ()) -> list[str]:
    """Compare a saved state with what decides the order of samples now.

    Args:
        current: of this run, ``Schedule.identity()``.
        state: of the run to continue, ``Schedule.state_dict(step)``.
        allow_change: names of fields that may differ before the step of the state.

    Returns:
        One sentence per field that differs and may, saying what the change does; and one per stage
        that differs from the step of the state on, where everything may.

    Raises:
        ResumeError: it is no state; or something else differs, that is, what was done would be done
            otherwise; all of it is named with both values and the first step that differs.
        ConfigError: allow_change names a field that does not exist.
    """
    check_allowed(allow_change)
    step = int(state.get("step", -1))
    if step < 0 or "indices" not in state:
        raise ResumeError(
            f"this is no state of a schedule (step {state.get('step')}, fields "
            f"{', '.join(state) or 'none'}): give what state_dict(step) returned"
        )
    done = max(step, 1)  # a run that has not begun has a first stage nevertheless
    differing = list(_whole_run(current, state, done))
    changes = list(_stages(current, state, done))
    past = [change for change in changes if change[0] < done]
    rewritten = dict(past[0][1]) if past else {}
    for _, found in past[1:]:
        for name, text in found:
            if name != "from_step":  # a stage that begins elsewhere differs from there on
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
        trained = {name for name, _ in refused} <= {*_TRAINING, *_OF_LOSS}
        differs = "train otherwise on" if trained else "not see"
        raise ResumeError(
            f"this run would {differs} the samples the checkpoint's run would have seen: "
            + "; ".join(text for _, text in refused)
            + f". {remedy}, or allow_change=({names}) to go on regardless"
        )
    return [f"{text}: {_CONSEQUENCE[name]}" for name, text in differing] + [
        f"from step {begin} on {', '.join(text for _, text in fields)}"
        for begin, fields in changes
        if begin >= done
    ]


def check_allowed(allow_change: Collection[str]) -> None:
    """Refuse names that are no fields of the data order. Raises ConfigError."""
    check_known("checkpoint.allow_change", "field", allow_change, _CONSEQUENCE)


def _whole_run(current: State, state: State, step: int) -> Iterator[_Difference]:
    """Differences that concern the whole run; of sources, only those drawn before ``step``."""
    stages = (*_all_stages(current), *_all_stages(state))
    num_drawn = max(len(stage["weights"]) for stage in stages if stage["from_step"] < step)
    for name in (*_WHOLE_RUN, *_OF_LOSS):
        then, now = state.get(name), current.get(name)
        if not _same(name, then, now, num_drawn):
            yield name, f"{name} was {then!r} and is {now!r}"


def _same(name: str, then: Any, now: Any, num_drawn: int) -> bool:
    if name == "token_weights":
        then, now = (list(of or ()) + [None] * num_drawn for of in (then, now))
    if name in ("indices", "token_weights"):
        return bool(then[:num_drawn] == now[:num_drawn])
    return bool(then == now)


def _stages(current: State, state: State, step: int) -> Iterator[tuple[int, list[_Difference]]]:
    """(step from which on, what differs) wherever something else differs than before it."""
    now, then = _all_stages(current), _all_stages(state)
    last: list[_Difference] = []
    for begin in sorted({stage["from_step"] for stage in (*now, *then)} | {step}):
        ours, theirs = ([s for s in of if s["from_step"] <= begin][-1] for of in (now, then))
        alike = drawn_by(ours) == drawn_by(theirs)
        fields = [
            name for name in ours if ours[name] != theirs[name] and not (alike and name in _STAGE)
        ]
        if len(fields) > 1 and "from_step" in fields:
            fields.remove("from_step")  # of two stages that differ anyway
        found = [(name, f"{name} was {theirs[name]!r} and is {ours[name]!r}") for name in fields]
        if found and found != last:
            yield begin, found
        last = found


def _all_stages(state: State) -> list[dict[str, Any]]:
    """The stages of a state in full, but those that change nothing.

    Weights are those up to the last source that is drawn: later ones may have come since.
    """
    # What a stage without them does not speak of.
    always: dict[str, Any] = {"exclude": {}, "skipped": None, **dict.fromkeys(_TRAINING)}
    first: dict[str, Any] = {"from_step": 0, "skip_steps": 0}
    first |= {name: state.get(name) for name in (*_STAGE, *_TRAINING)}
    first["weights"] = first["weights"] or [None] * len(state["indices"])
    stages = [first, *state.get("stages", ())]
    found: list[dict[str, Any]] = []
    for given in stages:
        weights = given["weights"]
        drawn = max(i + 1 for i, weight in enumerate(weights) if weight != 0)
        stage = {**always, **given, "weights": list(weights[:drawn])}
        if found and not stage["skip_steps"] and drawn_by(found[-1]) == drawn_by(stage):
            rest = [name for name in stage if name not in (*_SKIPS, *_STAGE)]
            if all(stage[name] == found[-1][name] for name in rest):
                continue
        found.append(stage)
    return found


def resume_step(current: State, state: State, allow_change: Collection[str] = ()) -> int:
    """The step to continue with, after ``check_state``.

    Where another tokens_per_step was allowed for the past, it is the first step that is not wholly
    covered by the tokens seen.
    """
    check_state(current, state, allow_change)
    step = int(state["step"])
    seen = _tokens(_all_stages(state), step)
    now = _all_stages(current)
    if _tokens(now, step) == seen:
        return step
    begin = [stage for stage in now if _tokens(now, stage["from_step"]) <= seen][-1]
    missing = seen - _tokens(now, begin["from_step"])
    return int(begin["from_step"]) + missing // int(begin["tokens_per_step"])


def _tokens(stages: Sequence[dict[str, Any]], step: int) -> int:
    ends = [stage["from_step"] for stage in stages[1:]] + [step]
    return sum(
        max(0, min(end, step) - stage["from_step"]) * int(stage["tokens_per_step"])
        for stage, end in zip(stages, ends, strict=True)
    )
