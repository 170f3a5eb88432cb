"""Rules by which a run edits itself: what it skips after a spike, what it draws next.

A run is a program (``megapack.data.program``), and what a rule decides is a stage of it, appended
to ``decisions.json`` (``megapack.data.run.Decision``) before it takes effect. So a decision is made
once: whoever opens the run later, training, ``trace`` or a resumed run, reads it there.

- ``SpikeWatch``: looks at losses and gradient norms step by step; ``Spike`` says where one began
- ``skip``: the decision that follows a spike
- ``SourceReport``, ``next_mixture``: the decision of a mixing rule; ``odm`` is the one built in

    watch = SpikeWatch(AutopilotConfig(spikes=True, window=64, deviations=8, confirm=3))
    # losses 2.0, 2.1, 1.9, ... for 400 steps, then 2.0, 4.8, 5.1, 5.0 at steps 400 to 403
    # -> Spike(401, 403, "loss 4.8 at step 401, where its bucket has 2 +- 0.07")
    skip(spike, config, decisions=None, ...).stage
    # -> from_step 400, skip_steps 5: one step more on both sides (margin_steps)
"""

from __future__ import annotations

import importlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from megapack.data.blend import Stage
from megapack.data.run import Decision, Decisions
from megapack.errors import ConfigError
from megapack.training.config import AutopilotConfig, MixingConfig
from megapack.training.engine.directory import is_lost
from megapack.training.monitoring.monitor import mean_by_source

Line = Mapping[str, Any]  # of log.jsonl

# ---- Spikes --------------------------------------------------------------------------------------

FEWEST = 16  # values before another one is judged
HORIZON = 32  # windows of steps after which a value is forgotten, if its bucket is rarely drawn
MAD = 1.4826  # deviations of a normal law in a median absolute deviation
_LEAST = {"loss": 0.02, "grad_norm": 0.1}  # deviations are at least so large, relative


class Spike(NamedTuple):
    """Where the run left its path."""

    first: int
    """The first step that was out of its band."""
    last: int
    """The step that confirmed it."""
    reason: str
    """A sentence."""


class SpikeFound(Exception):  # noqa: N818 - it is answered by ``Trainer``, not reported
    """Raised on all ranks alike."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(spike.reason)
        self.spike = spike


class SpikeWatch:
    """Judges every step by those before it: robustly, by median and deviation, never by a mean.

    A loss is compared with the losses of its bucket, whose levels differ, and a source's with its
    own; gradient norms by their logarithms. What is out of its band does not become part of it. A
    spike is confirmed when one signal is out in ``confirm`` of twice as many steps (the other steps
    may be of buckets that have none of what did it); a loss that is not a number confirms itself.

    Args:
        config: of the run.
    """

    def __init__(self, config: AutopilotConfig) -> None:
        self.config = config
        self._bands: dict[str, deque[tuple[int, float]]] = {}
        self._out: dict[str, list[int]] = {}  # signal -> the last steps in which it was out
        self._mixture = ""

    def look(self, line: Line, mixture: str) -> Spike | None:
        """At the next step.

        Args:
            line: of log.jsonl.
            mixture: a word for what is drawn at this step: where it changes, the levels of losses
                and gradients do, and their bands begin anew; those of sources stay.
        """
        if mixture != self._mixture:
            kept = {name: band for name, band in self._bands.items() if name.startswith("source")}
            self._mixture, self._bands, self._out = mixture, kept, {}
        step = int(line["step"])
        begin = step - 2 * self.config.confirm  # steps of before are forgotten
        out = {signal: [s for s in steps if s > begin] for signal, steps in self._out.items()}
        self._out = {signal: steps for signal, steps in out.items() if steps}
        if is_lost(line):
            first = min((steps[0] for steps in self._out.values()), default=step)
            return Spike(first, step, f"the loss of step {step} is not a number")
        found = None
        for signal, band, value in _signals(line):
            found = self._judge(signal, band, step, value) or found
        return found

    def _judge(self, signal: str, band: str, step: int, value: float) -> Spike | None:
        history = self._bands.setdefault(band, deque(maxlen=self.config.window))
        while history and history[0][0] < step - HORIZON * self.config.window:
            history.popleft()
        if len(history) < FEWEST:
            if math.isfinite(value):  # not so a gradient that overflowed
                history.append((step, value))
            return None
        values = [old for _, old in history]
        middle = median(values)
        least = _LEAST["grad_norm" if signal == "grad_norm" else "loss"]
        spread = max(
            MAD * median(abs(old - middle) for old in values), least * _scale(band, middle)
        )
        if value <= middle + self.config.deviations * spread:
            history.append((step, value))
            return None
        out = self._out.setdefault(signal, [])
        out.append(step)
        if len(out) < self.config.confirm:
            return None
        first = out[0]
        if signal == "grad_norm":
            value, middle = math.exp(value), math.exp(middle)
        reason = f"{signal} {value:.4g} at step {step}, where {middle:.4g} is usual"
        return Spike(first, step, f"{reason} (out of its band since step {first})")

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON."""
        bands = {name: list(map(list, band)) for name, band in self._bands.items()}
        return {"bands": bands, "out": dict(self._out), "mixture": self._mixture}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as the watch whose state it is; an empty one begins anew."""
        self._mixture = state.get("mixture", "")
        self._out = {signal: list(steps) for signal, steps in state.get("out", {}).items()}
        self._bands = {
            name: deque(((int(s), float(v)) for s, v in band), self.config.window)
            for name, band in state.get("bands", {}).items()
        }


def _signals(line: Line) -> Iterable[tuple[str, str, float]]:
    """(signal, its band, value) of a step; one without labels says nothing, nor of a source."""
    bucket = line["capacity"]
    if line["loss"] is not None:
        yield "loss", f"loss of bucket {bucket}", line["loss"]
    norm = line["grad_norm"]
    if norm is None or norm > 0:
        value = math.inf if norm is None else math.log(norm)
        yield "grad_norm", f"gradients of bucket {bucket}", value
    for name, loss in line.get("source_loss", {}).items():
        if loss is not None:
            yield f"loss of {name}", f"source {name}", loss


def _scale(band: str, middle: float) -> float:
    """What the least deviation is relative to: a logarithm's is a ratio already."""
    return 1.0 if band.startswith("gradients") else abs(middle)


def skip(spike: Spike, config: AutopilotConfig, decisions: Decisions, done: int) -> Decision:
    """The stage that skips a spike's steps: exactly the samples that they contained.

    Skipped is what was out, and ``margin_steps`` on both sides; twice as much as the last time
    where the run meets the same stretch again. It depends on the spike alone, so runs that looked
    at other steps first decide the same.

    Raises:
        FloatingPointError: the run went back as often as it may.
    """
    count = decisions.number("autopilot")
    if count >= config.max_rollbacks:
        raise FloatingPointError(
            f"{spike.reason}; the run went back {count} times (autopilot.max_rollbacks) and stops "
            "here: look at what it skipped (megapack-build trace RUN_DIR/config.yaml --skipped), "
            "lower optimizer.lr, or allow more"
        )
    begin = max(1, spike.first - config.margin_steps)
    size = spike.last - begin + 1 + config.margin_steps
    near = sum(
        old.by == "autopilot" and not old.void and abs(old.begin - begin) <= 2 * size
        for old in decisions.decisions
    )
    return Decision(
        by="autopilot",
        step=done,
        reason=spike.reason,
        stage=Stage(from_step=begin, skip_steps=size << near),
    )


# ---- Mixtures that learn -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """What a mixing rule is given: everything since its last decision, by name of the source."""

    step: int
    """Steps done."""
    num_steps: int
    """Of the run."""
    losses: dict[str, float]
    """Mean loss per label token, to five digits, so that rounding of other ranks decides nothing; a
    source that had none is missing."""
    label_tokens: dict[str, int]
    weights: dict[str, float]
    """Shares of tokens that hold now; their sum is 1."""
    state: dict[str, Any] = field(default_factory=dict)
    """What the rule returned with its last decision."""


Rule = Callable[..., tuple[Mapping[str, float], Mapping[str, Any]]]


def odm(report: SourceReport, *, smoothing: float = 0.9) -> tuple[dict[str, float], dict[str, Any]]:
    """Online data mixing (Albalak et al. 2023, arXiv 2312.02406): what is not yet learned, more.

    A bandit (EXP3) whose arms are the sources. With K sources, at decision t, the reward of a
    source is a moving average of its loss over its share, ``R <- a R + (1 - a) loss / share``; its
    share becomes ``(1 - K e_t) softmax(e_{t-1} R) + e_t`` with ``e_t = min(1 / K,
    sqrt(ln K / (K t)))``, so that none falls below ``e_t``. The paper pulls one arm per batch; here
    all sources that had tokens since the last decision are updated at once.

    Args:
        report: of the run.
        smoothing: the paper's a.
    """
    names, last = list(report.weights), report.state
    time = int(last.get("time", 0)) + 1
    rewards = {name: float(last.get("rewards", {}).get(name, 0.0)) for name in names}
    for name, loss in report.losses.items():
        share = max(report.weights[name], 1e-6)
        rewards[name] = smoothing * rewards[name] + (1 - smoothing) * loss / share
    size = len(names)
    explored = [
        min(1 / size, math.sqrt(math.log(size) / (size * max(1, t)))) for t in (time, time - 1)
    ]
    top = max(rewards.values())
    powers = {name: math.exp(explored[1] * (reward - top)) for name, reward in rewards.items()}
    total = math.fsum(powers.values())
    weights = {
        n: (1 - size * explored[0]) * power / total + explored[0] for n, power in powers.items()
    }
    return weights, {"time": time, "rewards": rewards}


RULES: dict[str, Rule] = {"odm": odm}


def find_rule(name: str) -> Rule:
    """A rule of ``RULES``, or the function that ``package.module:function`` names.

    Raises:
        ConfigError: there is no such function.
    """
    if name in RULES:
        return RULES[name]
    module, colon, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function) if colon else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"mixing.rule is {name!r}: {error}") from error
    if not callable(found):
        raise ConfigError(
            f"mixing.rule is {name!r}; it must be {', '.join(RULES)}, or a function as in "
            "package.module:function"
        )
    rule: Rule = found
    return rule


def next_mixture(config: MixingConfig, report: SourceReport) -> Decision:
    """Ask the rule, and check its answer.

    Raises:
        ConfigError: the rule fails, names other sources, or gives weights that are none.
    """
    assert config.rule is not None, "asked without a rule"
    where = f"mixing.rule {config.rule}"
    try:
        weights, state = find_rule(config.rule)(report, **config.options)
        weights = {name: float(weight) for name, weight in weights.items()}
        state = json.loads(json.dumps(state))  # as a resumed run will read it
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} failed at step {report.step}: {error!r}") from error
    unknown = sorted(set(weights) - set(report.weights))
    if unknown:
        raise ConfigError(f"{where} gives a weight to {unknown[0]!r}, which is no source")
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"{where} gives {name!r} the weight {weight}; it must be 0 or more")
    drawn = {name: weight for name, weight in weights.items() if weight > 0}
    if not drawn:
        raise ConfigError(f"{where} gives no source a weight; at least one must be above 0")
    return Decision(
        by="mixing",
        step=report.step,
        reason=", ".join(f"{name} {loss:g}" for name, loss in report.losses.items()),
        stage=Stage(from_step=report.step, weights=drawn),
        state=state,
    )


def report_of(
    lines: Iterable[Line],
    decisions: Decisions | None,
    weights: Mapping[str, float],
    num_steps: int,
    step: int,
) -> SourceReport:
    """A report from lines of log.jsonl.

    Args:
        lines: of the log, in order.
        decisions: of the run; None: it has made none.
        weights: that hold now, in any unit.
        num_steps, step: of the run; done.
    """
    made = decisions.decisions if decisions else ()
    own = [old for old in made if old.by == "mixing" and not old.void]
    since = own[-1].begin if own else 0
    means = mean_by_source([line for line in lines if since <= line["step"] < step])
    total = math.fsum(weights.values())
    return SourceReport(
        step=step,
        num_steps=num_steps,
        losses={name: float(f"{loss:.5g}") for name, (loss, _) in means.items()},
        label_tokens={name: tokens for name, (_, tokens) in means.items()},
        weights={name: weight / total for name, weight in weights.items()},
        state=own[-1].state if own else {},
    )
