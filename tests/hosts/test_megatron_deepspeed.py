"""A real Megatron-DeepSpeed checkout: every call of the model in a training, on all ranks.

``MEGATRON_DEEPSPEED=/path/to/checkout make test-hosts``. The guide's pretrain_packed.py runs the
host's pretrain_gpt.py under DeepSpeed's launcher; DeepSpeed's engine trains on the CPU. Every token
of the corpus has an id of its own, so batches alone tell whether labels, masks, positions and
boundaries are right.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hosts import matrix
from tests.hosts.check import (
    check_evaluation,
    check_program,
    compare,
    load_ranks,
)
from tests.hosts.corpus import NUM_WEB, Corpus
from tests.hosts.mds_layouts import (
    FULL_VALIDATION,
    GLOBAL_BATCH,
    LAYERS,
    LAYOUTS,
    SCRIPT,
    Layout,
    run,
)
from tests.hosts.processes import ROOT, trees_of

TREES = trees_of("MEGATRON_DEEPSPEED")
HOST = "Megatron-DeepSpeed"

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        not TREES, reason="MEGATRON_DEEPSPEED names no checkout of Megatron-DeepSpeed"
    ),
]

Rows = dict[int, tuple[int, ...]]


def test_the_guide_has_the_script_that_is_run() -> None:
    guide = (ROOT / "docs" / "guides" / "megatron_deepspeed.md").read_text()
    assert f"```python\n{SCRIPT}```" in guide


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_call_is_handed_the_documents(
    layout: Layout, tree: Path, corpus: Corpus, tmp_path: Path, known_rows: dict[str, Rows]
) -> None:
    log = run(tree, layout, corpus, tmp_path / "run")
    sizes = {"rows": layout.train_iters * GLOBAL_BATCH, "layers": LAYERS}
    told = (HOST, tree, layout.name, tmp_path / "run", corpus)
    found = matrix.trained(*told, **sizes, shifted=True)
    assert found.attentions == LAYERS * found.calls
    assert "validation loss at iteration 3" in log
    assert log.count("| lm loss:") == layout.train_iters, "and the run went to its end"
    compare(known_rows.setdefault(layout.data, {}), found, at_least=GLOBAL_BATCH)
    if layout.data == "program.json":
        check_program(found, corpus, GLOBAL_BATCH)


def test_a_run_resumes_with_other_ranks_and_micro_batches(
    tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Two ranks to iteration 2, then one rank with micro batches of 3 from its checkpoint.

    Not with the pipeline engine: loading what DeepSpeed's bf16 optimizer of two ranks saved is a
    KeyError in DeepSpeed.
    """
    checkpoint = str(tmp_path / "checkpoint")
    keep = ("--save", checkpoint, "--save-interval", "2")
    first = Layout(name="save", ranks=2)
    then = Layout(name="load", ranks=1, micro_batch=3)
    run(tree, first, corpus, tmp_path / "saved", *keep, "--exit-interval", "2")
    run(tree, then, corpus, tmp_path / "loaded", *keep, "--load", checkpoint)
    folders = (tmp_path / "saved", tmp_path / "loaded")
    matrix.resumed(HOST, tree, folders, corpus, rows=GLOBAL_BATCH, shifted=True)


VALUE = re.compile(r" validation loss at .*?lm loss value: (\S+)")
# Documents of web that --split 70,20,10 has for validation and for the test.
SETS = [range(int(0.7 * NUM_WEB), int(0.9 * NUM_WEB)), range(int(0.9 * NUM_WEB), NUM_WEB)]


@pytest.mark.parametrize("layout", FULL_VALIDATION, ids=lambda layout: layout.name)
def test_full_validation_is_the_documents_one_by_one(
    layout: Layout, tree: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Each once, and what is logged is the mean over all labels; also of a run that is resumed."""
    folders = [tmp_path / "saved", tmp_path / "loaded"]
    keep = ("--save", str(tmp_path / "checkpoint"), "--save-interval", "2")
    until = ("--eval-interval", "2", "--exit-interval", "2")
    logs = [run(tree, layout, corpus, folders[0], *keep, *until)]
    # With the pipeline engine from the beginning: DeepSpeed cannot load, see above.
    then = () if layout.engine else (*keep, "--load", keep[1])
    logs.append(run(tree, layout, corpus, folders[1], *then))
    for folder, log, count in zip(folders, logs, (1, 3), strict=True):
        found, means = check_evaluation(load_ranks(folder), corpus, SETS, shifted=True)
        matrix.note(HOST, tree.name, layout.name, found)
        assert not found.problems, "\n".join(found.problems[:20])
        assert len(means) == count, "at step 2; at step 3, and of validation and test at the end"
        logged = [float(value) for value in VALUE.findall(log)]
        assert logged == pytest.approx(means, rel=2e-6)
