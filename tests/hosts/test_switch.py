"""Into megapack in the middle of a run, and out of it again, by the host's own checkpoints."""

from __future__ import annotations

from pathlib import Path

from tests.hosts.check import check_run, load_ranks
from tests.hosts.corpus import STEP_ROWS, Corpus
from tests.hosts.helpers import compile_helpers
from tests.hosts.layouts import Host, Layout
from tests.hosts.losses import iterations
from tests.hosts.processes import marks_of
from tests.hosts.test_megatron_lm import TREES

pytestmark = marks_of(TREES, "MEGATRON_LM", "Megatron-LM")


def test_run_switches_to_megapack_and_back(host: Host, corpus: Corpus, tmp_path: Path) -> None:
    """GPTDataset to iteration 2, packed rows to iteration 4, GPTDataset again to iteration 5.

    Weights, optimizer and the count of samples continue; the count is a position in megapack's
    order of rows, which so begins at row 24.
    """
    helpers = compile_helpers(host.tree, tmp_path)
    checkpoint = str(tmp_path / "checkpoint")
    keep = ("--ckpt-format", "torch", "--save", checkpoint, "--load", checkpoint)
    layout = Layout(name="switched", ranks=2, data="web", rows="default buckets", train_iters=5)
    logs = [
        host.run(layout, corpus, tmp_path / f"run {until}", *keep, *end, helpers=own)
        for until, own in ((2, helpers), (4, None), (5, helpers))
        for end in [() if until == 5 else ("--exit-interval", str(until))]
    ]
    steps = [[rows // STEP_ROWS for rows, _, _ in iterations(log)] for log in logs]
    assert steps == [[1, 2], [3, 4], [5]]
    before, packed, after = (load_ranks(tmp_path / f"run {until}") for until in (2, 4, 5))
    assert not any(rank["reads"] for rank in before + after), "those ran on GPTDataset"
    found = check_run(packed, corpus)
    found.hold()
    assert found.rows.keys() == set(range(2 * STEP_ROWS, 4 * STEP_ROWS))
