"""What a checkpoint keeps of the data: a step number and the identity of the order of samples.

There is no generator state: any step is computed from (index, configuration, step). So a state
fits every number of ranks, micro batch size and number of workers, and all a resume has to do is
to refuse when the order is not the one the run began with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megapack.errors import ConfigError, ResumeError

__all__ = ["ORDER_VERSION", "check_state", "resume_step"]

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


def check_state(
    current: Mapping[str, Any], state: Mapping[str, Any], allow_change: Collection[str] = ()
) -> list[str]:
    """Compare a saved state with what decides the order of samples now.

    Args:
        current: of this run, ``Schedule.identity()``.
        state: of the run to continue, ``Schedule.state_dict(step)``.
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
    current: Mapping[str, Any], state: Mapping[str, Any], allow_change: Collection[str] = ()
) -> int:
    """The step to continue with, after ``check_state``.

    With another tokens_per_step it is the first one not wholly covered by the tokens seen.
    """
    check_state(current, state, allow_change)
    seen = int(state["step"]) * int(state["tokens_per_step"])
    return seen // int(current["tokens_per_step"])
