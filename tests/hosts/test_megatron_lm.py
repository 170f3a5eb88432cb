"""Real Megatron-LM checkouts: every call of the model in pretrain_gpt.py, on all ranks.

``MEGATRON_LM=/path/to/checkout[:/path/to/another] make test-hosts``. The script is run unchanged,
with the environment that torchrun gives it; CUDA is mapped to the CPU and nccl to gloo (cpu.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hosts import matrix
from tests.hosts.check import (
    Findings,
    check_evaluation,
    check_program,
    check_run,
    compare,
    load_ranks,
)
from tests.hosts.corpus import NUM_FEW, NUM_WEB, ROW, STEP_ROWS, Corpus
from tests.hosts.layouts import FULL_VALIDATION, LAYOUTS, Host, Layout
from tests.hosts.losses import VALIDATION, iterations, wrong_losses
from tests.hosts.processes import LEAK, REFUSED, marks_of, trees_of

TREES = trees_of("MEGATRON_LM")

pytestmark = marks_of(TREES, "MEGATRON_LM", "Megatron-LM")

Known = dict[Any, Any]


@pytest.fixture(scope="module")
def known() -> Known:
    """Rows by their number, for every kind of data: the same in all runs of all releases.

    Also the loss and the gradient of the first step: equal for all ranks of one release.
    """
    return {}


def check(host: Host, layout: Layout, corpus: Corpus, folder: Path, *more: str) -> Findings:
    """Run the layout; what was found, the log's losses compared with the model's."""
    log = host.run(layout, corpus, folder, *more)
    ranks = load_ranks(folder)
    losses = list(wrong_losses(log, ranks, _first_row(ranks), ROW))
    found = check_run(ranks, corpus, align=layout.align, workers="--num-workers" in layout.flags)
    found.problems += losses
    found.steps = iterations(log)
    assert re.search(r"\d+ segments of a micro batch are kept apart: probed in", log)
    assert all(rank["probed"] for rank in ranks)
    return found


def _first_row(ranks: list[dict[str, Any]]) -> int:
    reads = [read for rank in ranks for read in rank["reads"] if read["split"] == "train"]
    return min(row for read in reads for row in read["rows"])


def note(host: Host, layout: str, found: Findings) -> None:
    matrix.note("Megatron-LM", ".".join(map(str, host.release)), layout, found)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_call_gets_the_documents(
    layout: Layout, host: Host, corpus: Corpus, tmp_path: Path, known: Known
) -> None:
    if not layout.runs_on(host.release):
        pytest.skip("not for this release")
    found = check(host, layout, corpus, tmp_path / "records")
    note(host, layout.name, found)
    found.hold()
    consumed = found.steps[-1][0]
    if layout.train_samples:
        assert 0 <= layout.train_samples - consumed < STEP_ROWS
        sizes = np.diff([0, *(rows for rows, _, _ in found.steps)])
        assert sizes[0] == 4 and sizes[-1] == STEP_ROWS, "and the global batch grew"
    else:
        assert consumed == layout.train_iters * STEP_ROWS
    assert found.rows.keys() == set(range(consumed)), "the run went to its end, row by row"
    assert found.splits == set(layout.splits)
    assert found.calls > 0 and found.segments > found.calls
    assert (found.ahead > 0) == ("MTP" in layout.name)
    compare(known.setdefault(layout.rows or layout.data, {}), found, at_least=STEP_ROWS)
    if layout.data == "program.json":
        check_program(found, corpus, STEP_ROWS)
    if layout.name.startswith("DP") and not layout.rows:
        _, loss, norm = found.steps[0]
        first = known.setdefault((host.tree, layout.data), (loss, norm))
        assert (loss, norm) == pytest.approx(first, rel=2e-3), "a step is a step on any ranks"


@pytest.mark.parametrize(
    ("fault", "ranks", "flags", "said"),
    [
        ("boundaries shifted", 1, "", LEAK),
        ("a boundary missing", 1, "", LEAK),
        ("windows lost", 1, "", LEAK),
        ("mask shifted", 1, "", "against the loss mask"),
        ("boundaries lost", 2, "", LEAK),
        ("boundaries lost", 2, "--pipeline-model-parallel-size 2", LEAK),
    ],
)
def test_probe_catches_injected_faults(
    fault: str, ranks: int, flags: str, said: str, host: Host, corpus: Corpus, tmp_path: Path
) -> None:
    data = "program.json" if "windows" in fault else "web.json"
    layout = Layout(name=fault, ranks=ranks, flags=flags, data=data)
    with pytest.raises(AssertionError, match=f"{REFUSED}megatron-core.*{said}"):
        host.run(layout, corpus, tmp_path / "records", fault=fault)


def test_a_run_is_the_same_with_and_without_the_probe(
    host: Host, corpus: Corpus, tmp_path: Path
) -> None:
    """Generators, too: there is dropout."""
    layout = Layout(name="dropout", ranks=1, flags="--hidden-dropout 0.2", train_iters=2)
    logs = [
        host.run(layout, corpus, tmp_path / f"{len(options)}", options=options)
        for options in ([], ["--no-probe"])
    ]
    assert ["probed in" in log for log in logs] == [True, False]
    assert list(iterations(logs[0])) == list(iterations(logs[1]))


def test_run_resumes_on_other_ranks_and_micro_batches(
    host: Host, corpus: Corpus, tmp_path: Path, known: Known
) -> None:
    """Two ranks to iteration 2, three to iteration 3, then one with micro batches of 3."""
    checkpoint = str(tmp_path / "checkpoint")
    keep = ("--ckpt-format", "torch", "--save", checkpoint, "--load", checkpoint)
    three = "" if host.release == (0, 18) else "--micro-batch-size 3"
    runs = [(2, "", 2), (3, "", 3), (1, three, 5)]
    rows, whole = 0, Findings()
    for ranks, flags, until in runs:
        layout = Layout(name=f"{ranks} ranks", ranks=ranks, flags=flags, train_iters=5)
        more = () if until == 5 else ("--exit-interval", str(until))
        found = check(host, layout, corpus, tmp_path / layout.name, *keep, *more)
        whole.calls, whole.segments = whole.calls + found.calls, whole.segments + found.segments
        whole.problems += found.problems
        note(host, "DP 2, then 3, then 1", whole)
        found.hold()
        assert found.rows.keys() == set(range(rows, until * STEP_ROWS))
        compare(known.setdefault("web.json", {}), found, at_least=0)
        rows = until * STEP_ROWS


@pytest.mark.parametrize("layout", FULL_VALIDATION, ids=lambda layout: layout.name)
def test_full_validation_loss_equals_that_of_single_documents(
    layout: Layout, host: Host, corpus: Corpus, tmp_path: Path
) -> None:
    """Every label of a set counts alike, and what the host logs is the mean over them.

    A host goes through a set as often as it takes micro batches per step (0.16: rows), as a whole.
    """
    if not layout.runs_on(host.release):
        pytest.skip("not for this release")
    sets = [range(NUM_WEB), range(NUM_WEB, NUM_WEB + NUM_FEW)]
    flags = ["--full-validation", "--multiple-validation-sets"]
    log = host.run(layout, corpus, tmp_path / "records", *flags)
    assert "segments of a micro batch are kept apart: probed in" in log
    found, means = check_evaluation(load_ranks(tmp_path / "records"), corpus, sets)
    note(host, layout.name, found)
    found.hold()
    assert len(means) == 2 * len(sets), "after 3 steps of 4, and at the end"
    assert [float(value) for value in VALIDATION.findall(log)] == pytest.approx(means, rel=2e-6)


def test_context_parallelism_over_whole_rows_is_refused(
    host: Host, corpus: Corpus, tmp_path: Path
) -> None:
    """RoPE takes the parts for parts of documents, with any dataset (test_megatron_parts.py)."""
    if host.release < (0, 19):
        pytest.skip("this release has no inter-document masking")
    flags = "--context-parallel-size 2 --dataloader-inter-document-masking"
    with pytest.raises(AssertionError, match=r"inter-document masking splits whole rows.*--sft"):
        host.run(Layout(name="CP 2", ranks=2, flags=flags), corpus, tmp_path / "records")
