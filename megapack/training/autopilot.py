"""Rules by which a run edits its own program: skip a loss spike, change the source weights.

A decision is a stage of the run's program (``megapack.data.program``), appended to
``decisions.json`` (``megapack.data.run.Decision``) before it takes effect. Each is made
only once: a resumed run and ``trace`` read it from that file.

- ``SpikeWatch`` checks losses and gradient norms step by step; a ``Spike`` is a range of steps
- ``skip`` returns the decision after a spike
- ``next_mixture`` returns the decision of a mixing rule, from a ``SourceReport``; ``odm`` is a rule

    watch = SpikeWatch(AutopilotConfig(spikes=True, window=64, deviations=8, confirm=3))
    # losses 2.0, 2.1, 1.9, ... for 400 steps, then 2.0, 4.8, 5.1, 5.0 at steps 400 to 403
    # -> Spike(401, 403, "loss 5 at step 403, where 2 is usual (...)")
    skip(spike, config, decisions, done=404).stage
    # -> from_step 400, skip_steps 5: one more step on both sides (margin_steps)
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

Line = Mapping[str, Any]  # line of log.jsonl

# ---- Spikes --------------------------------------------------------------------------------------

FEWEST = 16  # values that a band needs before it can detect outliers
HORIZON = 32  # bands forget values that are older than this many windows of steps
MAD = 1.4826  # standard deviation of a normal distribution / its median absolute deviation
_LEAST = {"loss": 0.02, "grad_norm": 0.1}  # smallest spread of a band, relative to its median


class Spike(NamedTuple):
    """Range of steps whose losses or gradients are outliers."""

    first: int  # first outlier
    last: int  # step that confirms the spike
    reason: str  # one sentence for the log


class SpikeFound(Exception):  # noqa: N818 - ``Trainer`` handles it, it is not reported
    """Raised on all ranks when a spike is confirmed."""

    def __init__(self, spike: Spike) -> None:
        super().__init__(spike.reason)
        self.spike = spike


class SpikeWatch:
    """Detector of spikes by median and median absolute deviation of earlier steps.

    The losses of each bucket and of each source have their own band; gradient norms are compared by
    their logarithms. Outliers do not enter the band. A spike is confirmed when one signal has
    ``confirm`` outliers within twice as many steps; a NaN or infinite loss is a spike at once.
    """

    def __init__(self, config: AutopilotConfig) -> None:
        self.config = config
        self._bands: dict[str, deque[tuple[int, float]]] = {}
        self._out: dict[str, list[int]] = {}  # signal -> its recent outliers, by step
        self._mixture = ""

    def look(self, line: Line, mixture: str) -> Spike | None:
        """Check the line of the next step; return a confirmed spike or None. When ``mixture``,
        which identifies the mixture of the step, changes, so do the levels of losses and gradients:
        all bands are reset, except those of single sources."""
        if mixture != self._mixture:
            kept = {name: band for name, band in self._bands.items() if name.startswith("source")}
            self._mixture, self._bands, self._out = mixture, kept, {}
        step = int(line["step"])
        begin = step - 2 * self.config.confirm  # forget earlier outliers
        out = {signal: [s for s in steps if s > begin] for signal, steps in self._out.items()}
        self._out = {signal: steps for signal, steps in out.items() if steps}
        if is_lost(line):
            first = min((steps[0] for steps in self._out.values()), default=step)
            return Spike(first, step, f"the loss of step {step} is not a number")
        spike = None
        for signal, band, value in _signals(line):
            spike = self._judge(signal, band, step, value) or spike
        return spike

    def _judge(self, signal: str, band: str, step: int, value: float) -> Spike | None:
        history = self._bands.setdefault(band, deque(maxlen=self.config.window))
        while history and history[0][0] < step - HORIZON * self.config.window:
            history.popleft()
        if len(history) < FEWEST:
            if math.isfinite(value):  # the norm of an overflowed gradient is not finite
                history.append((step, value))
            return None
        values, is_norm = [old for _, old in history], signal == "grad_norm"
        middle = median(values)
        # Differences of logarithms are relative already.
        least = _LEAST["grad_norm"] if is_norm else _LEAST["loss"] * abs(middle)
        spread = max(MAD * median(abs(old - middle) for old in values), least)
        if value <= middle + self.config.deviations * spread:
            history.append((step, value))
            return None
        out = self._out.setdefault(signal, [])
        out.append(step)
        if len(out) < self.config.confirm:
            return None
        if is_norm:
            value, middle = math.exp(value), math.exp(middle)
        reason = f"{signal} {value:.4g} at step {step}, where {middle:.4g} is usual"
        return Spike(out[0], step, f"{reason} (out of its band since step {out[0]})")

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        bands = {name: list(map(list, band)) for name, band in self._bands.items()}
        return {"bands": bands, "out": dict(self._out), "mixture": self._mixture}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a result of ``state()``; an empty mapping resets the watch."""
        self._mixture = state.get("mixture", "")
        self._out = {signal: list(steps) for signal, steps in state.get("out", {}).items()}
        self._bands = {
            name: deque(((int(s), float(v)) for s, v in band), self.config.window)
            for name, band in state.get("bands", {}).items()
        }


def _signals(line: Line) -> Iterable[tuple[str, str, float]]:
    """Yield (signal, band, value); a step or source without labels has no loss."""
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


def skip(spike: Spike, config: AutopilotConfig, decisions: Decisions, done: int) -> Decision:
    """Return the decision that skips a spike's outliers and ``margin_steps`` on both sides. Each
    earlier skip of about the same range doubles the number of steps. Raises FloatingPointError if
    ``autopilot.max_rollbacks`` is used up."""
    count = decisions.number("autopilot")
    if count >= config.max_rollbacks:
        raise FloatingPointError(
            f"{spike.reason}; the run rolled back {count} times (autopilot.max_rollbacks) and "
            "stops here: see what it skipped (megapack-build trace RUN_DIR/config.yaml --skipped), "
            "lower optimizer.lr, or allow more"
        )
    begin = max(1, spike.first - config.margin_steps)
    size = spike.last - begin + 1 + config.margin_steps
    near = sum(
        old.by == "autopilot" and not old.void and abs(old.begin - begin) <= 2 * size
        for old in decisions.decisions
    )
    stage = Stage(from_step=begin, skip_steps=size << near)
    return Decision(by="autopilot", step=done, reason=spike.reason, stage=stage)


# ---- Mixtures ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """Input of a mixing rule: results since its last decision, by source name."""

    step: int  # steps done
    num_steps: int  # steps of the run
    losses: dict[str, float]
    """Mean loss per label token, rounded to five digits so that decisions do not depend on the
    number of ranks; sources without tokens are missing."""
    label_tokens: dict[str, int]
    weights: dict[str, float]  # current shares of tokens; their sum is 1
    state: dict[str, Any] = field(default_factory=dict)  # as the last call of the rule returned it


Rule = Callable[..., tuple[Mapping[str, float], Mapping[str, Any]]]


def odm(report: SourceReport, *, smoothing: float = 0.9) -> tuple[dict[str, float], dict[str, Any]]:
    """Online data mixing (Albalak et al. 2023, arXiv 2312.02406): draw sources with high loss more.

    A bandit (EXP3) whose arms are the K sources. At decision t, the reward of a source is ``R <- a
    R + (1 - a) loss / share``, with a = ``smoothing``. Its share becomes ``(1 - K e_t)
    softmax(e_{t-1} R) + e_t``, with the smallest share ``e_t = min(1 / K, sqrt(ln K / (K t)))``.
    The paper pulls one arm per batch; this rule updates all sources drawn since its last decision.
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
    """Return the rule or the function ``package.module:function``. Raises ConfigError."""
    if name in RULES:
        return RULES[name]
    module, colon, function = name.partition(":")
    try:
        rule: Rule | None = getattr(importlib.import_module(module), function) if colon else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"mixing.rule is {name!r}: {error}") from error
    if not callable(rule):
        raise ConfigError(
            f"mixing.rule is {name!r}; it must be {', '.join(RULES)}, or a function as in "
            "package.module:function"
        )
    return rule


def next_mixture(config: MixingConfig, report: SourceReport) -> Decision:
    """Call the rule. Raises ConfigError if it fails, names unknown sources or gives bad weights."""
    assert config.rule is not None, "the configuration has no rule"
    where = f"mixing.rule {config.rule}"
    try:
        weights, state = find_rule(config.rule)(report, **config.options)
        weights = {name: float(weight) for name, weight in weights.items()}
        state = json.loads(json.dumps(state))  # equal to the state that a resumed run reads
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} failed at step {report.step}: {error!r}") from error
    unknown = sorted(set(weights) - set(report.weights))
    if unknown:
        raise ConfigError(f"{where} gives a weight to {unknown[0]!r}, which is not a source")
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
    """Return a report from lines of log.jsonl; ``weights`` need not sum to 1."""
    all_decisions = decisions.decisions if decisions else ()
    earlier = [old for old in all_decisions if old.by == "mixing" and not old.void]
    begin = earlier[-1].begin if earlier else 0
    means = mean_by_source([line for line in lines if begin <= line["step"] < step])
    total = math.fsum(weights.values())
    return SourceReport(
        step=step,
        num_steps=num_steps,
        losses={name: float(f"{loss:.5g}") for name, (loss, _) in means.items()},
        label_tokens={name: tokens for name, (_, tokens) in means.items()},
        weights={name: weight / total for name, weight in weights.items()},
        state=earlier[-1].state if earlier else {},
    )
