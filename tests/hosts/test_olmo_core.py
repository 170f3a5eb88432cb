"""A real OLMo-core checkout: every call of the model in a training, on all ranks.

``OLMO_CORE=/path/to/checkout[:/another] make test-hosts``. The example is started by torchrun and
trains on the CPU: OLMo-core's model, train module, trainer, FSDP2 or DDP, checkpoints.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megapack.errors import ConfigError
from tests.hosts import matrix
from tests.hosts.corpus import LAYERS, ROW, STEP_ROWS, Corpus, write_short
from tests.hosts.processes import (
    CHANGED,
    LEAK,
    environment_of,
    finish,
    is_refused,
    marks_of,
    torchrun,
    trees_of,
)

TREES = trees_of("OLMO_CORE")
HOST = "OLMo-core"
STEPS = 4
TOLERANCE = 1e-5  # of a gradient's largest entry, float32

pytestmark = marks_of(TREES, "OLMO_CORE", "OLMo-core")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run: its number of ranks, options of the example, and its data."""

    name: str
    ranks: int = 1
    micro_batch: int = 3
    options: str = ""
    data: str = "web.json"
    steps: int = STEPS


READERS = "--data-parallel ddp --num-workers 2"
LAYOUTS = (
    Layout(name="DP 1, 3 epochs", steps=12),
    Layout(name="DP 2 (FSDP), blend", ranks=2, data="mix.json"),
    Layout(name="DP 2, micro batch 1", ranks=2, micro_batch=1),
    Layout(name="DP 2 (DDP), readers", ranks=2, micro_batch=6, options=READERS),
    Layout(
        name="DP 3, stages and an attention window", ranks=3, micro_batch=2, data="program.json"
    ),
)


def command(layout: Layout, corpus: Corpus, folder: Path) -> list[str]:
    return [
        *torchrun(layout.ranks, "launch_olmo_core.py"),
        *(corpus.path(layout.data), str(folder / "saved")),
        *("--vocabulary", str(corpus.vocabulary), "--width", "64", "--layers", str(LAYERS)),
        *("--sequence-length", str(ROW), "--step-rows", str(STEP_ROWS)),
        *("--micro-batch-rows", str(layout.micro_batch), "--steps", str(layout.steps)),
        *layout.options.split(),
    ]


def environment(tree: Path, folder: Path) -> dict[str, str]:
    """Return the arguments of a run in a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return {**environment_of(tree / "src", "hosts-olmo-core"), "HOST_RECORDS": str(folder)}


def run(
    tree: Path,
    layout: Layout,
    corpus: Corpus,
    folder: Path,
    save: Path | None = None,
    **variables: str,
) -> str:
    """Run the layout; return the log."""
    around = environment(tree, folder) | variables
    return finish(
        command(layout, corpus, save or folder), folder, around, f"{layout.name} on {tree}"
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_call_gets_the_documents(
    layout: Layout, tree: Path, corpus: Corpus, tmp_path: Path, known_rows: dict[str, Any]
) -> None:
    log = run(tree, layout, corpus, tmp_path / "run")
    known = known_rows.setdefault(layout.data, {})
    told = (HOST, tree, layout.name, tmp_path / "run", corpus)
    found = matrix.trained(*told, steps=layout.steps, known=known)
    assert found.attentions == LAYERS * found.calls
    assert f"step={layout.steps}/{layout.steps}" in log
    assert log.count("documents of a micro batch are kept apart: probed in") >= 1


def test_loss_and_gradient_of_a_row_equal_those_of_its_documents(
    tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    log = run(tree, Layout(name="one", steps=2), corpus, tmp_path / "run", HOST_ONE_BY_ONE="1")
    ((loss, gradient),) = re.findall(r"one by one: (\S+) (\S+)", log)
    assert float(loss) < TOLERANCE and float(gradient) < TOLERANCE


def test_gradient_of_two_ranks_equals_that_of_one(
    tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Ranks have unequally many labels; OLMo-core's own mean weighs them alike."""
    ranks = (("1", 1, ""), ("2", 2, ""), ("means", 2, "mean of means"))
    for name, size, wrong in ranks:
        layout = Layout(name=name, ranks=size, steps=1)
        run(tree, layout, corpus, tmp_path / name, HOST_SABOTAGE=wrong)
    one, two, means = (torch.load(tmp_path / name / "gradient.pt") for name, _, _ in ranks)
    scale = one.abs().max()
    assert (two - one).abs().max() < TOLERANCE * scale
    assert (means - one).abs().max() > 100 * TOLERANCE * scale


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 1), (2, 3)], ids=["DP 1", "DP 2"])
def test_evaluation_loss_equals_that_of_single_documents(
    ranks: int, micro_batch: int, tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Every document once, of which none is cut; the last rows are empty."""
    texts = write_short(corpus, ROW)
    name = f"evaluation to its end, DP {ranks}"
    options = f"--evaluate {corpus.path('short.json')}"
    layout = Layout(name=name, ranks=ranks, micro_batch=micro_batch, options=options, steps=1)
    log = run(tree, layout, corpus, tmp_path / "run", HOST_VALIDATED=corpus.path("short"))
    told = {"log": log, "texts": texts, "ranks": ranks, "tolerance": TOLERANCE}
    matrix.evaluated(HOST, tree, name, tmp_path / "run", corpus, **told)


def test_run_resumes_on_other_ranks_and_micro_batches(
    tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Two ranks to step 2, then one rank with larger micro batches from its checkpoint."""
    first = Layout(name="save", ranks=2, micro_batch=1, data="mix.json", steps=2)
    run(tree, first, corpus, tmp_path / "saved")
    then = Layout(name="load", micro_batch=4, data="mix.json")
    run(tree, then, corpus, tmp_path / "loaded", save=tmp_path / "saved")
    folders = (tmp_path / "saved", tmp_path / "loaded")
    matrix.resumed(HOST, tree, folders, corpus)


def test_epochs_and_a_changed_batch_size_keep_the_order_of_rows(
    tree: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``BatchSizeScheduler`` sets it, between two steps; blocks hold the larger one."""
    for folder in (Path(sys.prefix) / "hosts-olmo-core", tree / "src"):
        monkeypatch.syspath_prepend(str(folder))
    ours: Any = importlib.import_module("megapack.integrations.hosts.olmo_core")
    sizes = {"sequence_length": ROW, "global_batch_size": 6 * ROW, "work_dir": tmp_path}
    loader = ours.PackedOlmoLoader(corpus.path("web.json"), **sizes)
    rows, found = loader.rows.rows_per_epoch, []
    loader.reshuffle()
    for batch in loader:
        found.append(batch["input_ids"])
        if len(found) == 2:
            state = loader.state_dict()
            loader.global_batch_size = STEP_ROWS * ROW
    assert loader.batches_processed == loader.total_batches == rows // STEP_ROWS
    loader.reset()
    loader.reshuffle()
    found += [batch["input_ids"] for batch in loader]
    assert torch.equal(torch.cat(found), loader.rows.micro_batch(range(2 * rows))["tokens"])
    loader.load_state_dict(state)
    loader.reshuffle(1)
    assert torch.equal(torch.cat([b["input_ids"] for b in loader]), torch.cat(found)[12:rows])
    loader.reset()
    with pytest.raises(ConfigError, match=r"12 rows, which is not a multiple of 1 ranks x 24"):
        loader.global_batch_size = 24 * ROW


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("boundary", LEAK),
        ("no boundary", LEAK),
        ("labels", "against the loss mask; this holds for"),
        ("loader", f"'labels' {CHANGED}"),
        ("no callback", "add PackedOlmoCallback of megapack.integrations.hosts.olmo_core"),
    ],
)
def test_injected_faults_are_refused(
    wrong: str, said: str, tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    around = environment(tree, tmp_path) | {"HOST_SABOTAGE": wrong}
    is_refused(command(Layout(name="wrong"), corpus, tmp_path), tmp_path, around, said)
