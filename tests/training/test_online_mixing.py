"""The example of online mixing: its law, its preference, and a run that it edits twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from examples.online_mixing import ado, fit, new_weights
from megapack.data.run import read_decisions
from megapack.training.autopilot import report_of
from megapack.training.engine.directory import read_jsonl

from .conftest import Corpus
from .processes import Zygote, read_log, start_run
from .test_sources import blend_config, write_blend


def test_law_of_a_loss_is_found() -> None:
    tokens = np.arange(1, 200) * 1000.0
    e, b, a = fit(tokens, 1.5 + 40 * tokens**-0.4)
    assert (e, b, a) == pytest.approx((1.5, 40, 0.4), rel=0.05)
    assert fit(tokens, np.linspace(2, 3, 199))[2] == 0, "a loss that rises has no speed"


def test_source_that_still_falls_is_preferred_to_one_that_is_learned() -> None:
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
def test_run_is_edited_by_its_own_losses_and_remembers_every_mixture(
    zygote: Zygote, corpus: Corpus, tmp_path: Path
) -> None:
    blend = write_blend(tmp_path / "blend.yaml", corpus)
    run_dir = tmp_path / "run"
    config = blend_config(
        blend, corpus, run_dir, num_steps=11, logging={"every": 3}, evaluation={"every": None},
        mixing={"rule": "examples.online_mixing:ado", "every": 2},
    )  # fmt: skip
    start_run(zygote, config, "one", "stop_at=7", ranks=1).succeed()
    start_run(zygote, config, "two", ranks=1).succeed()
    decided = read_decisions(run_dir)
    assert decided is not None and [d.begin for d in decided.decisions] == [2, 4, 6, 8, 10]
    assert all(set(d.stage.weights or ()) == {"web", "math"} for d in decided.decisions)
    log = read_log(run_dir)
    assert [line["step"] for line in log] == list(range(11))
    before = dataclasses.replace(decided, decisions=decided.decisions[:4])
    report = report_of(log, before, decided.decisions[3].stage.weights or {}, 11, step=10)
    weights, state = ado(report)
    assert weights == decided.decisions[4].stage.weights, "a function of the log"
    assert {name: len(curve) for name, curve in state["curves"].items()} == {"web": 5, "math": 5}
    starts = list(read_jsonl(run_dir / "starts.jsonl"))
    stages = [len(start["data_order"].get("stages", ())) for start in starts]
    assert stages == [0, 2], "of three decisions the first, with too few points, changed nothing"
    # The learning rate is that of the whole run, not of its parts.
    assert log[3]["lr"] > log[7]["lr"] > log[10]["lr"] > 0
