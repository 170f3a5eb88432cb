"""What a checkpoint keeps of the data: a step number and the identity of the order of samples.

There is no generator state: any step is computed from (index, configuration, step). So a state
fits every number of ranks, micro batch size and number of workers, and all a resume has to do is
to refuse when the order is not the one the run began with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from megapack.config import to_dict
from megapack.errors import ConfigError, ResumeError

if TYPE_CHECKING:
    from megapack.data.schedule import Schedule

__all__ = ["ORDER_VERSION", "check_state", "order_fields", "resume_step", "state_dict"]

# Raised whenever the same (index, configuration, step) would give other samples than before.
# 2: blends take from their datasets by exact weights.
ORDER_VERSION = 2

_RESHUFFLED = "from here on the samples of the epoch come in another order: some again, some not"
_CONSEQUENCE = {
    "order_version": "another version of megapack orders samples differently; " + _RESHUFFLED,
    "tokens_per_step": "the step number is converted by tokens seen; a step draws other samples",
    "seed": _RESHUFFLED,
    "order": _RESHUFFLED,
    "num_cycles": _RESHUFFLED,
    "mix": _RESHUFFLED,
    "micro_step_tokens": _RESHUFFLED,
    "row_tokens": "draws hold another number of samples; " + _RESHUFFLED,
    "cost_window": "samples of a window are grouped differently; " + _RESHUFFLED,
    "indices": "other data; the epochs counted so far no longer mean anything",
    "weights": "datasets are taken in other proportions; " + _RESHUFFLED,
}


def order_fields(schedule: Schedule) -> dict[str, Any]:
    """Everything that decides the order of samples: numbers, names and fingerprints (JSON)."""
    return {
        "order_version": ORDER_VERSION,
        **to_dict(schedule.config),
        "num_cycles": schedule.num_cycles,
        "indices": list(schedule.samples.fingerprints),
        "weights": schedule.samples.weights,
    }


def state_dict(schedule: Schedule, step: int) -> dict[str, Any]:
    """The state before ``step`` is taken: that number and ``order_fields``."""
    return {"step": int(step), **order_fields(schedule)}


def check_state(
    schedule: Schedule, state: Mapping[str, Any], allow_change: Collection[str] = ()
) -> list[str]:
    """Compare a saved state with a schedule.

    Args:
        schedule: of this run.
        state: of ``state_dict``, from the run to continue.
        allow_change: names of fields that may differ.

    Returns:
        One sentence per field that differs and may, saying what the change does.

    Raises:
        ResumeError: another field differs; all of them are named with both values.
        ConfigError: allow_change names a field that does not exist.
    """
    unknown = set(allow_change) - set(_CONSEQUENCE)
    if unknown:
        raise ConfigError(
            f"allow_change has {', '.join(sorted(unknown))}; fields are {', '.join(_CONSEQUENCE)}"
        )
    current = order_fields(schedule)
    differing = [
        (name, f"{name} was {state.get(name)!r} and is {value!r}")
        for name, value in current.items()
        if state.get(name) != value
    ]
    refused = [(name, text) for name, text in differing if name not in allow_change]
    if refused:
        names = ", ".join(name for name, _ in refused)
        remedy = "Restore the former configuration"
        if "order_version" in names:
            remedy = "Continue with the version of megapack that began the run"
        raise ResumeError(
            "this run would not see the samples the checkpoint's run would have seen: "
            + "; ".join(text for _, text in refused)
            + f". {remedy}, or allow_change=({names}) to go on regardless"
        )
    return [f"{text}: {_CONSEQUENCE[name]}" for name, text in differing]


def resume_step(
    schedule: Schedule, state: Mapping[str, Any], allow_change: Collection[str] = ()
) -> int:
    """The step to continue with, after ``check_state``.

    With another tokens_per_step it is the first one not wholly covered by the tokens seen.
    """
    check_state(schedule, state, allow_change)
    seen = int(state["step"]) * int(state["tokens_per_step"])
    return seen // schedule.config.tokens_per_step
