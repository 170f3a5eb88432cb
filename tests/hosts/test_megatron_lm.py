"""Real Megatron-LM checkouts: every call of the model in pretrain_gpt.py, on all ranks.

``MEGATRON_LM=/path/to/checkout[:/path/to/another] make test-hosts``. The script is run unchanged
under torchrun; CUDA is mapped to the CPU and nccl to gloo (cpu.py). Every token of the corpus has
an id of its own, so batches alone tell whether labels, masks, positions and boundaries are right.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hosts.check import Findings, check_run
from tests.hosts.corpus import MASKED, NUM_WEB, WINDOW, Corpus, write_corpus
from tests.hosts.layouts import GLOBAL_BATCH, LAYOUTS, Layout, release_of, run
from tests.hosts.matrix import MATRIX

TREES = [Path(path) for path in os.environ.get("MEGATRON_LM", "").split(os.pathsep) if path]

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
    cell = f"{found.calls:,} / {found.segments:,} / {len(found.problems)}"
    MATRIX[".".join(map(str, release_of(tree))), layout] = cell


def compare(
    known: dict[int, tuple[int, ...]], found: Findings, *, at_least: int = GLOBAL_BATCH
) -> None:
    shared = known.keys() & found.rows.keys()
    assert all(known[number] == found.rows[number] for number in shared)
    assert not known or len(shared) >= at_least, "the runs have rows in common"
    known.update(found.rows)


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
    compare(known_rows.setdefault(layout.data, {}), found)
    if layout.data == "program.json":
        check_program(found, corpus)


def check_program(found: Findings, corpus: Corpus) -> None:
    """Two steps attend inside a window; one has little code; two show no masked document."""
    steps: list[dict[str, Any]] = [{"documents": set(), "longest": 0} for _ in range(4)]
    for number, row in found.rows.items():
        step = steps[number // GLOBAL_BATCH]
        tokens = np.array([token for token in row if token])
        step["documents"] |= set((np.searchsorted(corpus.begins, tokens, "right") - 1).tolist())
        step["longest"] = max(step["longest"], found.longest[number])
    shares = [np.mean([document >= NUM_WEB for document in step["documents"]]) for step in steps]
    assert shares[0] < 0.5 < min(shares[1:])
    assert all((step["longest"] <= WINDOW) == (i < 2) for i, step in enumerate(steps))
    assert all(bool(step["documents"] & set(MASKED)) == (i < 2) for i, step in enumerate(steps))


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
    compare(known, before)
    compare(known, after, at_least=0 if len(known) == 2 * GLOBAL_BATCH else GLOBAL_BATCH)
