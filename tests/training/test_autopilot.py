"""Rules by which a run edits itself: it detects and skips spikes, sets mixtures by losses, and
keeps its decisions in every resume."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import printed
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.online_mixing import ado, fit, new_weights
from megapack.cli.main import main as build
from megapack.data.blend import Mixture, Stage
from megapack.data.program import resolve
from megapack.data.run import Decision, Decisions, read_decisions
from megapack.data.steps import ScheduleConfig
from megapack.errors import ConfigError
from megapack.training.autopilot import (
    SourceReport,
    Spike,
    SpikeWatch,
    next_mixture,
    odm,
    report_of,
    skip,
)
from megapack.training.config import AutopilotConfig, MixingConfig
from megapack.training.monitoring.heartbeat import LOST_CONTACT

from .conftest import PER_STEP, ROW, NewRun, Run, drawn_from, noisy_blend

CONFIG = AutopilotConfig(spikes=True, window=32)


def line(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "capacity": 64, "grad_norm": 0.4, **more}


def levels(seed: int, num_steps: int) -> list[dict[str, Any]]:
    """Return log lines of a normal run: falling losses by bucket, gradients with a tail."""
    random = np.random.default_rng(seed)
    buckets = random.choice([32, 64, 128], num_steps)
    fall = 1.05 + 3 * np.exp(-np.arange(num_steps) / 40) + 0.4 * (buckets == 32)
    losses = fall * random.lognormal(0, 0.03, num_steps)
    norms = random.lognormal(-1, 0.3, num_steps)
    rows = zip(losses.tolist(), norms.tolist(), buckets.tolist(), strict=True)
    return [line(i, x, grad_norm=g, capacity=b) for i, (x, g, b) in enumerate(rows)]


# ---- Spikes


@pytest.mark.parametrize("seed", range(10))
def test_no_spikes_in_noise(seed: int) -> None:
    watch = SpikeWatch(CONFIG)
    assert not any(watch.look(item, "") for item in levels(seed, 600))


def test_spike_in_every_other_step_is_detected() -> None:
    watch = SpikeWatch(CONFIG)
    found = []
    for item in levels(0, 400):
        if item["step"] >= 300 and item["capacity"] == 64:
            item["loss"] *= 3
        found += [spike] if (spike := watch.look(item, "")) else []
    first = next(i["step"] for i in levels(0, 400)[300:] if i["capacity"] == 64)
    assert found[0].first == first and found[0].last < first + 2 * CONFIG.confirm
    assert f"is usual (out of its band since step {first})" in found[0].reason


def test_spike_of_one_source_or_of_gradients_is_detected() -> None:
    for name, value in (("source_loss", {"web": 1.0, "code": 4.0}), ("grad_norm", 40.0)):
        watch = SpikeWatch(CONFIG)
        for step in range(60):
            usual = {"source_loss": {"web": 1.0, "code": 0.7 + step % 7 / 100}}
            assert watch.look(line(step, 1.0, **usual), "") is None
        found = [watch.look(line(s, 1.0, **{**usual, name: value}), "") for s in (60, 61, 62)]
        assert found[:2] == [None, None] and found[2] is not None
        assert (found[2].first, found[2].last) == (60, 62)


def test_isolated_outliers_are_not_a_spike() -> None:
    watch, high = SpikeWatch(CONFIG), range(40, 400, 2 * CONFIG.confirm + 1)
    found = [watch.look(line(step, 9.0 if step in high else 1.0), "") for step in range(400)]
    assert found == [None] * 400, "an outlier counts for twice `confirm` steps only"


def test_old_levels_are_forgotten() -> None:
    watch, again = SpikeWatch(CONFIG), 40 + 40 * CONFIG.window
    steps = [*range(40), *range(again, again + 40)]  # the bucket is rarely drawn
    found = [watch.look(line(step, 1.0 if step < 40 else 9.0), "") for step in steps]
    assert found == [None] * 80


def test_nan_loss_is_a_spike_at_once() -> None:
    spike = SpikeWatch(CONFIG).look(line(7, None), "")
    assert spike is not None and (spike.first, spike.last) == (7, 7)


def test_overflow_of_first_gradients_is_not_a_spike() -> None:
    watch = SpikeWatch(CONFIG)
    norms = [None] * 10 + [0.4] * 70
    found = [watch.look(line(step, 1.0, grad_norm=norm), "") for step, norm in enumerate(norms)]
    assert found == [None] * 80
    assert all(math.isfinite(v) for _, v in watch.state()["bands"]["gradients of bucket 64"])


def test_new_mixture_is_not_a_spike() -> None:
    """A new mixture starts new bands; those of sources stay."""
    watch, drawn = SpikeWatch(CONFIG), [("a", 1.0)] * 40 + [("b", 3.0)] * 40
    found = [watch.look(line(step, loss), mixture) for step, (mixture, loss) in enumerate(drawn)]
    assert found == [None] * 80


@given(seed=st.integers(0, 99), cut=st.integers(0, 399), noise=st.integers(100, 390))
@settings(max_examples=20, deadline=None)
def test_watch_restores_its_state(seed: int, cut: int, noise: int) -> None:
    lines = levels(seed, 400)
    for item in lines[noise : noise + 6]:
        item["loss"] *= 4
    whole, resumed = SpikeWatch(CONFIG), SpikeWatch(CONFIG)
    expected = [whole.look(item, "") for item in lines]
    found = [resumed.look(item, "") for item in lines[:cut]]
    other = SpikeWatch(CONFIG)
    other.restore(json.loads(json.dumps(resumed.state())))
    assert found + [other.look(item, "") for item in lines[cut:]] == expected


def _decided(*decisions: Decision) -> Decisions:
    return Decisions(num_epochs=1, num_steps=100, decisions=decisions)


def test_skip_doubles_in_the_same_range() -> None:
    decided = _decided()
    for first in (40, 41, 40, 90):
        decided = decided.with_new(skip(Spike(first, first + 2, "loss"), CONFIG, decided, 50))
    assert [made.stage.skip_steps for made in decided.decisions] == [5, 10, 20, 5]
    assert [s.from_step for s in decided.stages] == [39, 40, 39, 89]
    few = AutopilotConfig(spikes=True, max_rollbacks=4)
    with pytest.raises(
        FloatingPointError, match=r"rolled back 4 times \(autopilot.max_rollbacks\)"
    ):
        skip(Spike(95, 97, "loss"), few, decided, 99)


# ---- Decisions and the program


@given(
    written=st.lists(st.integers(1, 60), unique=True, max_size=3).map(sorted),
    made=st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 5), st.sampled_from([None, 1.0, 3.0])),
        min_size=1,
        max_size=4,
        unique_by=lambda one: one[0],
    ).map(sorted),
)
@settings(max_examples=100, deadline=None)
def test_decisions_equal_stages_written_by_hand(
    written: list[int], made: list[tuple[int, int, float | None]]
) -> None:
    decided = _decided()
    stages = [Stage(from_step=begin, weights={"web": begin, "math": 2.0}) for begin in written]
    by_hand: dict[int, dict[str, Any]] = {s.from_step or 0: dict(weights=s.weights) for s in stages}
    for number, (begin, skipped, share) in enumerate(made, 1):
        # An earlier skip would not affect weights that are decided later.
        weights = None if share is None else {"web": share, "math": 1.0}
        steps = skipped if number == len(made) else 0
        stage = Stage(from_step=begin, skip_steps=steps, weights=weights)
        decided = decided.with_new(Decision(by="autopilot", step=61, reason="", stage=stage))
        entry = by_hand.setdefault(begin, {})
        entry["skip_steps"] = entry.get("skip_steps", 0) + steps
        entry["weights"] = weights or entry.get("weights")
    mixture = Mixture(weights=[1, 1], stages=stages, decided=decided.stages)
    expected = [Stage(from_step=begin, **by_hand[begin]) for begin in sorted(by_hand)]
    found, wanted = (
        resolve(ScheduleConfig(tokens_per_step=64), one.of(["web", "math"]))
        for one in (mixture, Mixture(weights=[1, 1], stages=expected))
    )
    assert found == wanted


def test_decisions_round_trip(tmp_path: Path) -> None:
    stage = Stage(from_step=4, weights={"web": 0.1 + 0.2})
    learned = Decision(by="mixing", step=4, reason="web 1.0", stage=stage, state={"time": 1})
    back = Decision(by="autopilot", step=9, reason="", stage=Stage(from_step=3, skip_steps=5))
    decided = _decided(learned).with_new(back)
    decided.write(tmp_path)
    assert read_decisions(tmp_path) == decided
    assert [d.void for d in decided.decisions] == [True, False], (
        "a decision from steps that were rolled back"
    )
    assert decided.stages == [stage, back.stage] and read_decisions(tmp_path / "none") is None
    (tmp_path / "decisions.json").write_text('{"num_epochs": 1}')
    with pytest.raises(ConfigError, match="num_steps"):
        read_decisions(tmp_path)


# ---- Mixtures


def test_odm_equals_the_formula_of_its_paper() -> None:
    """arXiv 2312.02406, algorithm 1, three decisions of two sources."""
    losses = [{"a": 3.0, "b": 2.0}, {"a": 2.5}, {"a": 2.0, "b": 1.9}]
    weights, state, rewards = {"a": 0.5, "b": 0.5}, {}, {"a": 0.0, "b": 0.0}
    for t, seen in enumerate(losses, start=1):
        report = SourceReport(
            step=t, num_steps=9, losses=seen, label_tokens={}, weights=weights, state=state
        )
        for name, loss in seen.items():
            rewards[name] = 0.9 * rewards[name] + 0.1 * loss / weights[name]
        now, before = (min(0.5, math.sqrt(math.log(2) / (2 * max(1, u)))) for u in (t, t - 1))
        powers = {name: math.exp(before * reward) for name, reward in rewards.items()}
        expected = {n: (1 - 2 * now) * p / sum(powers.values()) + now for n, p in powers.items()}
        weights, state = odm(report)
        assert weights == pytest.approx(expected)
        assert state["rewards"] == pytest.approx(rewards)
        assert sum(weights.values()) == pytest.approx(1) and min(weights.values()) >= now - 1e-12


def test_report_has_the_means_since_the_last_decision() -> None:
    def log_line(step: int, loss: float, labels: int) -> dict[str, Any]:
        means = {"source_loss": {"web": loss}, "source_label_tokens": {"web": labels}}
        return {"step": step, **means}

    lines = [log_line(0, 9.0, 1), log_line(1, 2.0, 10), log_line(2, 4.0, 30), log_line(3, 1.0, 5)]
    stage = Stage(from_step=1, weights={"web": 1})
    made = _decided(Decision(by="mixing", step=1, reason="", stage=stage, state={"time": 4}))
    report = report_of(lines, made, {"web": 3.0, "code": 1.0}, 9, step=3)
    assert report.losses == {"web": 3.5} and report.label_tokens == {"web": 40}
    assert report.weights == {"web": 0.75, "code": 0.25} and report.state == {"time": 4}
    rounded = [log_line(1, 2.0 * (1 + 2e-7), 10), log_line(2, 4.0 * (1 - 1e-7), 30)]
    assert report_of(rounded, made, {"web": 3.0, "code": 1.0}, 9, step=3) == report, "other ranks"


REPORT = SourceReport(
    step=5, num_steps=9, losses={"a": 1.0}, label_tokens={"a": 3}, weights={"a": 0.5, "b": 0.5}
)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"c": 1}, "gives a weight to 'c', which is not a source"),
        ({"a": -1}, "gives 'a' the weight -1.0; it must be 0 or more"),
        ({"a": math.nan}, "the weight nan"),
        ({"a": 0}, "gives no source a weight"),
        (3, "failed at step 5: AttributeError"),
    ],
)
def test_invalid_results_of_mixing_rules_are_refused(weights: Any, message: str) -> None:
    config = MixingConfig(rule="tests.training.mixing_rules:answers", options={"weights": weights})
    with pytest.raises(ConfigError, match=message):
        next_mixture(config, REPORT)


@pytest.mark.parametrize(
    ("state", "kept"), [({"seen": (1, 2)}, {"seen": [1, 2]}), ({3: 0.5}, {"3": 0.5})]
)
def test_mixing_rule_gets_the_same_state_after_a_resume(
    state: Any, kept: Any, tmp_path: Path
) -> None:
    def answered(state: Any) -> Decision:
        options = {"weights": {"a": 1}, "state": state}
        config = MixingConfig(rule="tests.training.mixing_rules:answers", options=options)
        return next_mixture(config, REPORT)

    decision = answered(state)
    _decided(decision).write(tmp_path)
    resumed = read_decisions(tmp_path)
    assert resumed is not None and resumed.decisions[0].state == decision.state == kept
    with pytest.raises(ConfigError, match="failed at step 5: TypeError"):
        answered({"seen": {1, 2}})


# ---- Real runs

BEGIN, NOISE = 40, 10  # steps


@pytest.fixture
def noisy(new_run: NewRun, tmp_path: Path) -> NewRun:
    """``noisy(NAME, **sections)``: runs of 64 steps whose data are noise for ten of them."""
    blend = noisy_blend(tmp_path, num_steps=90, begin=BEGIN, noise=NOISE)
    # One micro step of two ranks: passes of tiny models take as long for more tokens.
    sizes = {"tokens_per_step": PER_STEP * ROW, "micro_batch_tokens": PER_STEP * ROW // 2}
    checkpoint = {"every": 5, "keep": 4, "export": False, "asynchronous": False}
    sections: dict[str, Any] = {
        "num_steps": 64,
        "data": {**drawn_from(blend), **sizes},
        "optimizer": {"lr": 0.02, "clip": 1.0},
        "learning_rate": {"kind": "constant", "warmup_steps": 4},
        "checkpoint": checkpoint,
        "autopilot": {"spikes": True, "window": 16, "deviations": 6.0},
    }

    def make(name: str, **more: Any) -> Run:
        return new_run(name, **{**sections, **more})

    return make


@pytest.mark.multiprocess
def test_autopilot_passes_noise_and_decides_the_same_after_a_kill(
    noisy: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = noisy("whole")
    whole.start().succeed("steps are skipped from step")
    log = whole.log
    assert [item["step"] for item in log] == list(range(64))
    high = [item["step"] for item in log[36:] if item["loss"] > 1.5]
    assert len(high) < CONFIG.confirm, "of ten noisy steps nearly all were skipped"
    decided = read_decisions(whole.dir)
    assert decided is not None and 1 <= len(decided.decisions) <= 4
    skipped = range(BEGIN - 2 * PER_STEP, BEGIN + 60)
    assert all(d.by == "autopilot" and d.begin in skipped for d in decided.decisions)

    killed = noisy("killed", engine={"heartbeat_timeout_seconds": 30})
    begin = decided.decisions[0].begin
    codes = killed.start(faults={0: {"kill_before_step": [begin - 6]}}).wait()
    assert codes == [-signal.SIGKILL, LOST_CONTACT]
    # On one rank from a checkpoint of two, killed between the decision and the rollback,
    # while there is a checkpoint of the steps that it abandons.
    fewer = killed.start(ranks=1, faults={0: {"kill_after_decision": []}})
    fewer.end_with(-signal.SIGKILL)
    aside = [path.name for path in killed.checkpoints.glob("step_*.abandoned")]
    assert aside and int(aside[0].split("_")[1]) > begin
    killed.succeed()
    printed("audit", killed.dir)  # exit status 0: proven after a rollback and a kill
    again = read_decisions(killed.dir)
    assert again is not None
    assert [d.stage for d in again.decisions] == [d.stage for d in decided.decisions]
    assert [i["samples"] for i in killed.log] == [i["samples"] for i in log]
    assert [i["loss"] for i in killed.log] == pytest.approx([i["loss"] for i in log], rel=2e-3)

    assert build(["trace", str(whole.dir / "config.yaml"), "--skipped", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["decisions"]
    shown = [s for fact in facts for step in fact["skipped"] for s in step["samples"]]
    noise = range(BEGIN * PER_STEP, (BEGIN + NOISE) * PER_STEP)
    assert set(noise) <= {sample["segments"][0][0] for sample in shown}, (
        "one command shows all noise"
    )


@pytest.mark.multiprocess
def test_autopilot_rolls_back_beyond_checkpoints_of_signals(noisy: NewRun) -> None:
    """Regression: newer checkpoints had replaced the one before the spike, and the run ended."""
    run = noisy("run")
    for stop in (40, 41, 42):
        run.succeed("checkpoint.keep=3", f"stop_at={stop}", ranks=1)
    run.start("checkpoint.keep=3", ranks=1).succeed("back to step 35")
    assert [item["step"] for item in run.log] == list(range(64))


@pytest.mark.multiprocess
def test_autopilot_of_a_branch_rolls_back_to_its_trunk(noisy: NewRun) -> None:
    """The noise begins before the first checkpoint of the branch."""
    trunk, branch = noisy("trunk"), noisy("branch")
    trunk.succeed("stop_at=35", ranks=1)
    (milestone,) = trunk.checkpoints.glob("step_00000035_*")
    rare = ["checkpoint.every=20", f"checkpoint.branch_from={milestone}", "stop_at=60"]
    branch.start(*rare, ranks=1).succeed("back to step 35")
    assert [item["step"] for item in branch.log] == list(range(60))
    assert branch.latest.startswith("step_00000060_")


@pytest.mark.multiprocess
def test_mixing_decisions_are_replayed_at_every_resume(new_run: NewRun, blend: Path) -> None:
    sections: dict[str, Any] = {
        "num_steps": 16,
        "data": drawn_from(blend),
        "mixing": {"rule": "tests.training.mixing_rules:doubles", "every": 4},
        "checkpoint": {"every": 3, "asynchronous": False, "export": False},
        "evaluation": {"every": None},
    }
    whole, moved = new_run("whole", **sections), new_run("moved", **sections)
    whole.succeed()
    moved.succeed("stop_at=5", ranks=1)
    # The second decision is on disk, but in no checkpoint yet.
    killed = moved.start(ranks=4, faults={rank: {"kill_before_step": [8]} for rank in range(4)})
    assert -signal.SIGKILL in killed.wait()
    moved.succeed("stop_at=13", faults={1: {"decisions_seen_late": []}})
    moved.succeed(ranks=1)
    printed("audit", moved.dir)
    ours, theirs = read_decisions(moved.dir), read_decisions(whole.dir)
    assert ours is not None and theirs is not None
    assert [d.begin for d in ours.decisions] == [4, 8, 12]
    stages = [[(d.stage, d.step) for d in one.decisions] for one in (ours, theirs)]
    assert stages[0] == stages[1]
    assert [item["samples"] for item in moved.log] == [item["samples"] for item in whole.log]


# ---- The example of a user's rule


def test_fit_recovers_the_loss_curve() -> None:
    tokens = np.arange(1, 200) * 1000.0
    e, b, a = fit(tokens, 1.5 + 40 * tokens**-0.4)
    assert (e, b, a) == pytest.approx((1.5, 40, 0.4), rel=0.05)
    assert fit(tokens, np.linspace(2, 3, 199))[2] == 0, "a rising loss has no speed"


def test_source_with_falling_loss_gets_more_weight() -> None:
    tokens = [100 * (step + 1) for step in range(300)]
    curves = {
        "learned": [(n, 2 + 9 / n) for n in tokens],
        "falling": [(n, 1 + 20 * n**-0.3) for n in tokens],
        "unseen": [],
    }
    weights = new_weights(curves, dict.fromkeys(curves, 1.0))
    assert sum(weights.values()) == pytest.approx(1, abs=1e-5)
    assert weights["unseen"] == pytest.approx(1 / 3, abs=0.01)
    assert weights["falling"] > 0.6 and 0.009 < weights["learned"] < 0.05


@pytest.mark.multiprocess
def test_run_sets_mixtures_by_its_losses(new_run: NewRun, blend: Path) -> None:
    data = drawn_from(blend)
    mixing = {"rule": "examples.online_mixing:ado", "every": 2}
    often = {"logging": {"every": 3}, "evaluation": {"every": None}}
    run = new_run(num_steps=11, data=data, mixing=mixing, **often)
    run.succeed("stop_at=7", ranks=1)
    run.succeed(ranks=1)
    decided, log = read_decisions(run.dir), run.log
    assert decided is not None and [d.begin for d in decided.decisions] == [2, 4, 6, 8, 10]
    assert all(set(d.stage.weights or ()) == {"web", "math"} for d in decided.decisions)
    assert [line["step"] for line in log] == list(range(11))
    before = dataclasses.replace(decided, decisions=decided.decisions[:4])
    report = report_of(log, before, decided.decisions[3].stage.weights or {}, 11, step=10)
    weights, state = ado(report)
    assert weights == decided.decisions[4].stage.weights, "a function of the log"
    assert {name: len(curve) for name, curve in state["curves"].items()} == {"web": 5, "math": 5}
    stages = [len(start["data_order"].get("stages", ())) for start in run.lines("starts")]
    assert stages == [0, 2], "the first of three decisions had too few points and changed nothing"
    # The learning rate is that of the whole run, not of its parts.
    assert log[3]["lr"] > log[7]["lr"] > log[10]["lr"] > 0
