"""A real GPT-NeoX checkout: every call of the model in a training, on all ranks.

``GPT_NEOX=/path/to/checkout make test-hosts``. The guide's train_packed.py is started by NeoX's own
deepy.py and DeepSpeed's launcher; DeepSpeed's engine trains on the CPU. Every token of the corpus
has an id of its own, so batches alone tell whether labels, masks, positions and boundaries are
right.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import matrix
from tests.hosts.check import (
    check_evaluation,
    check_program,
    compare,
    load_ranks,
)
from tests.hosts.corpus import NUM_WEB, Corpus
from tests.hosts.neox_layouts import (
    FULL_VALIDATION,
    GLOBAL_BATCH,
    LAYERS,
    LAYOUTS,
    SCRIPT,
    Layout,
    run,
)
from tests.hosts.processes import ROOT, trees_of

TREES = trees_of("GPT_NEOX")
HOST = "GPT-NeoX"

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not TREES, reason="GPT_NEOX names no checkout of GPT-NeoX"),
]

Rows = dict[int, tuple[int, ...]]


def test_the_guide_has_the_script_that_is_run() -> None:
    guide = (ROOT / "docs" / "guides" / "gpt_neox.md").read_text()
    assert f"```python\n{SCRIPT}```" in guide


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_call_is_handed_the_documents(
    layout: Layout, tree: Path, corpus: Corpus, tmp_path: Path, known_rows: dict[str, Rows]
) -> None:
    log = run(tree, layout, corpus, tmp_path / "run")
    sizes = {"rows": layout.train_iters * GLOBAL_BATCH, "layers": LAYERS}
    told = (HOST, tree, layout.name, tmp_path / "run", corpus)
    found = matrix.trained(*told, **sizes, shifted=True)
    recomputed = bool(layout.settings.get("checkpoint_activations"))
    assert (found.attentions > LAYERS * found.calls) == recomputed
    assert log.count("| lm_loss:") == layout.train_iters, "and the run went to its end"
    assert "nan |" not in log.lower()
    assert ("validation results" in log) == layout.evaluates
    # Where all documents train, rows are others.
    data = layout.data if layout.evaluates else f"{layout.data}, all"
    compare(known_rows.setdefault(data, {}), found, at_least=GLOBAL_BATCH)
    if layout.data == "program.json":
        check_program(found, corpus, GLOBAL_BATCH)


@pytest.mark.parametrize("stages", [0, 1], ids=["", "pipeline engine"])
def test_a_run_resumes_with_other_ranks_and_micro_batches(
    stages: int, tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Two ranks to iteration 2, then one rank with micro batches of 3 from its checkpoint."""
    keep: dict[str, Any] = {"save": str(tmp_path / "checkpoint"), "checkpoint_factor": 2}
    # A resumed run begins validation elsewhere, counted in micro batches, and repeats what it read.
    keep["split"] = "100,0,0"
    first = Layout(name="save", ranks=2, stages=stages)
    then = Layout(name="load", ranks=1, micro_batch=3, stages=stages)
    run(tree, first, corpus, tmp_path / "saved", **keep, exit_interval=2)
    run(tree, then, corpus, tmp_path / "loaded", **keep, load=keep["save"])
    told = {"rows": GLOBAL_BATCH, "remark": ", pipeline engine" if stages else ""}
    folders = (tmp_path / "saved", tmp_path / "loaded")
    matrix.resumed(HOST, tree, folders, corpus, **told, shifted=True)


VALUE = re.compile(r" (?:validation|test) results at .*?lm_loss value: (\S+)")
# Documents of web that --split 70,20,10 has for validation and for the test.
SETS = [range(int(0.7 * NUM_WEB), int(0.9 * NUM_WEB)), range(int(0.9 * NUM_WEB), NUM_WEB)]


@pytest.mark.parametrize("layout", FULL_VALIDATION, ids=lambda layout: layout.name)
def test_full_validation_is_the_documents_one_by_one(
    layout: Layout, tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Each once, and what is logged is the mean over all labels; also of a run that is resumed."""
    folders = [tmp_path / "saved", tmp_path / "loaded"]
    keep: dict[str, Any] = {"save": str(tmp_path / "checkpoint"), "checkpoint_factor": 2}
    saved = run(tree, layout, corpus, folders[0], **keep, eval_interval=2, exit_interval=2)
    logs = [saved, run(tree, layout, corpus, folders[1], **keep, load=keep["save"])]
    for folder, log, count in zip(folders, logs, (1, 3), strict=True):
        found, means = check_evaluation(load_ranks(folder), corpus, SETS, shifted=True)
        matrix.note(HOST, tree.name, layout.name, found)
        assert not found.problems, "\n".join(found.problems[:20])
        assert len(means) == count, "at step 2; at step 3, and of validation and test at the end"
        logged = [float(value) for value in VALUE.findall(log)]
        assert logged == pytest.approx(means, rel=2e-6)
