"""The example of online mixing: its law, its preference, and a run that it edits twice."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import yaml

from megapack.training.engine.directory import read_jsonl

from .conftest import Corpus
from .processes import PRETRAIN, ROOT, Zygote
from .test_sources import blend_config, write_blend

EXAMPLE = runpy.run_path(str(ROOT / "examples" / "online_mixing.py"))


def test_the_law_of_a_loss_is_found() -> None:
    tokens = np.arange(1, 200) * 1000.0
    e, b, a = EXAMPLE["fit"](tokens, 1.5 + 40 * tokens**-0.4)
    assert (e, b, a) == pytest.approx((1.5, 40, 0.4), rel=0.05)
    assert EXAMPLE["fit"](tokens, np.linspace(2, 3, 199))[2] == 0, "a loss that rises has no speed"


def test_a_source_that_still_falls_is_preferred_to_one_that_is_learned() -> None:
    def line(step: int) -> dict[str, dict[str, float]]:
        n = 100 * (step + 1)
        losses = {"learned": 2 + 9 / n, "falling": 1 + 20 * n**-0.3}
        return {"source_loss": losses, "source_label_tokens": dict.fromkeys(losses, 100)}

    prior = {"learned": 1.0, "falling": 1.0, "unseen": 1.0}
    weights = EXAMPLE["new_weights"]([line(step) for step in range(300)], prior)
    assert sum(weights.values()) == pytest.approx(1, abs=1e-5)
    assert weights["unseen"] == pytest.approx(1 / 3, abs=0.01)
    assert weights["falling"] > 0.6 and 0.009 < weights["learned"] < 0.05


def test_run_is_edited_by_its_losses(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    """Two edits, three starts of the real trainer; nothing but the manifest is changed."""

    def run(command: list[str]) -> int:
        argv = [str(PRETRAIN), *command[command.index("--config") :]]
        return max(zygote.start(argv, 1, tmp_path / "log").wait())

    blend = write_blend(tmp_path / "blend.yaml", corpus)
    run_dir = tmp_path / "run"
    path = blend_config(
        blend, corpus, run_dir, num_steps=11, logging={"every": 1}, evaluation={"every": None}
    )
    assert EXAMPLE["main"]([str(path), "--every", "4"], run=run) == 0
    stages = yaml.safe_load(blend.read_text())["stages"]
    assert [stage["from_step"] for stage in stages] == [4, 8]
    assert all(set(stage["weights"]) == {"web", "math"} for stage in stages)
    log = list(read_jsonl(run_dir / "log.jsonl"))
    assert [line["step"] for line in log] == list(range(11))
    again = EXAMPLE["new_weights"](log[:8], {"web": 1.0, "math": 1.0})
    assert stages[1]["weights"] == pytest.approx(again), "a function of the log"
    starts = list(read_jsonl(run_dir / "starts.jsonl"))
    assert [start["step"] for start in starts] == [0, 4, 8]
    assert [len(start["data_order"].get("stages", ())) for start in starts] == [0, 1, 2]
    assert starts[2]["data_order_changes"][0].startswith("from step 8 on weights was")
    # The learning rate is that of the whole run, not of its parts.
    assert log[3]["lr"] > log[7]["lr"] > log[10]["lr"] > 0
