"""Real Megatron-LM checkouts: every call of the model in pretrain_gpt.py, on all ranks.

``MEGATRON_LM=/path/to/checkout[:/path/to/another] make test-hosts``. The script is run unchanged
under torchrun; CUDA is mapped to the CPU and nccl to gloo (cpu.py). Every token of the corpus has
an id of its own, so batches alone tell whether labels, masks, positions and boundaries are right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts import matrix
from tests.hosts.check import Findings, check_program, check_run, compare
from tests.hosts.corpus import Corpus, write_corpus
from tests.hosts.layouts import GLOBAL_BATCH, LAYOUTS, Layout, release_of, run
from tests.hosts.processes import trees_of

TREES = trees_of("MEGATRON_LM")

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not TREES, reason="MEGATRON_LM names no checkout of Megatron-LM"),
]


@pytest.fixture(scope="module", params=TREES or [None], ids=lambda tree: tree and tree.name)
def tree(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="module")
def known_rows() -> dict[str, dict[int, tuple[int, ...]]]:
    """Rows by their number, for every kind of data: the same in all runs of all releases."""
    return {}


def note(tree: Path, layout: str, found: Findings) -> None:
    matrix.note("Megatron-LM", ".".join(map(str, release_of(tree))), layout, found)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_call_is_handed_the_documents(
    layout: Layout,
    tree: Path,
    corpus: Corpus,
    tmp_path: Path,
    known_rows: dict[str, dict[int, tuple[int, ...]]],
) -> None:
    if not layout.runs_on(release_of(tree)):
        pytest.skip("not for this release")
    log = run(tree, layout, corpus, tmp_path / "records")
    found = check_run(tmp_path / "records", corpus)
    note(tree, layout.name, found)
    assert not found.problems, "\n".join(found.problems[:20])
    assert found.rows.keys() == set(range(layout.train_iters * GLOBAL_BATCH))
    assert found.calls > 0 and found.segments > found.calls
    assert log.count("lm loss") >= layout.train_iters, "and the run went to its end"
    compare(known_rows.setdefault(layout.data, {}), found, at_least=GLOBAL_BATCH)
    if layout.data == "program.json":
        check_program(found, corpus, GLOBAL_BATCH)


def test_a_run_resumes_with_other_ranks_and_micro_batches(
    tree: Path, corpus: Corpus, tmp_path: Path, known_rows: dict[str, dict[int, tuple[int, ...]]]
) -> None:
    """Two ranks to iteration 2, then one rank with micro batches of 3 from its checkpoint."""
    checkpoint = str(tmp_path / "checkpoint")
    keep = ("--ckpt-format", "torch", "--save", checkpoint)
    first = Layout(name="save", ranks=2, train_iters=4)
    run(tree, first, corpus, tmp_path / "saved", *keep, "--exit-interval", "2")
    one_row = release_of(tree) == (0, 18)
    flags = "" if one_row else "--micro-batch-size 3"
    then = Layout(name="load", ranks=1, flags=flags, train_iters=4)
    run(tree, then, corpus, tmp_path / "loaded", *keep, "--load", checkpoint)
    before, after = (check_run(tmp_path / name, corpus) for name in ("saved", "loaded"))
    note(tree, "DP 2 to DP 1, resumed", after)
    assert not before.problems + after.problems
    assert before.rows.keys() == set(range(2 * GLOBAL_BATCH))
    assert after.rows.keys() == set(range(2 * GLOBAL_BATCH, 4 * GLOBAL_BATCH))
    known = known_rows.setdefault("web.json", {})
    compare(known, before, at_least=GLOBAL_BATCH)
    compare(known, after, at_least=0 if len(known) == 2 * GLOBAL_BATCH else GLOBAL_BATCH)
