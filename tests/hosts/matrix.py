"""Results of the runs of every host: compared with the documents, noted for the summary.

``trained``, ``resumed`` and ``evaluated`` are checks that every host of rows must pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hosts.check import (
    Findings,
    check_evaluation,
    check_program,
    check_run,
    compare,
    evaluated_labels,
    load_ranks,
)
from tests.hosts.corpus import LAYERS, NUM_WEB, STEP_ROWS, Corpus

MATRIX: dict[str, dict[tuple[str, str], str]] = {}
"""Host -> (release, layout) -> calls, segments, violations."""


def note(host: str, release: str, layout: str, found: Findings) -> None:
    cell = f"{found.calls:,} / {found.segments:,} / {len(found.problems)}"
    MATRIX.setdefault(host, {})[release, layout] = cell


def trained(
    host: str,
    tree: Path,
    layout: str,
    folder: Path,
    corpus: Corpus,
    *,
    steps: int,
    known: dict[int, tuple[int, ...]],
    program: bool = False,
    **how: Any,
) -> Findings:
    """Check that every call was right, that the rows of all steps were read, that known rows agree,
    and that all layers called attention."""
    found = check_run(load_ranks(folder), corpus, **how)
    note(host, tree.name, layout, found)
    found.hold()
    assert found.rows.keys() == set(range(steps * STEP_ROWS))
    assert found.segments > found.calls > 0
    assert found.attentions >= LAYERS * found.calls, "attention of every layer was noted"
    compare(known, found, at_least=STEP_ROWS)
    if program:
        check_program(found, corpus, STEP_ROWS)
    return found


def resumed(
    host: str, tree: Path, folders: Iterable[Path], corpus: Corpus, *, remark: str = "", **how: Any
) -> None:
    """Check two steps, then two steps of the resumed run."""
    before, after = (check_run(load_ranks(folder), corpus, **how) for folder in folders)
    note(host, tree.name, f"DP 2 to DP 1, resumed{remark}", after)
    assert not before.problems + after.problems
    assert before.rows.keys() == set(range(2 * STEP_ROWS))
    assert after.rows.keys() == set(range(2 * STEP_ROWS, 4 * STEP_ROWS))


def evaluated(
    host: str,
    tree: Path,
    name: str,
    folder: Path,
    corpus: Corpus,
    *,
    log: str,
    texts: Sequence[np.ndarray[Any, Any]],
    ranks: int,
    tolerance: float,
) -> None:
    """Check that an evaluation has every label once and, on all ranks, the documents' own loss."""
    recorded = load_ranks(folder)
    found = check_run(recorded, corpus)
    note(host, tree.name, name, found)
    found.hold()
    labels = evaluated_labels(recorded)
    assert labels == sorted(np.concatenate([text[1:] for text in texts]).tolist())
    told = re.findall(r"validated: (\S+) (\S+) (\d+)", log)
    assert len(told) == ranks
    for loss, expected, count in told:
        assert int(count) == len(labels)
        assert float(loss) == pytest.approx(float(expected), rel=tolerance)


# Documents of web that a split of 70, 20, 10 has for validation and for the test.
SETS = [range(int(0.7 * NUM_WEB), int(0.9 * NUM_WEB)), range(int(0.9 * NUM_WEB), NUM_WEB)]


def validated(
    host: str, tree: Path, name: str, folders: Sequence[Path], corpus: Corpus, logs: Iterable[str]
) -> None:
    """Check a run to step 2, which validates there, and one to its end, which validates at step 3
    and at the end, and tests: the logged loss is the mean over all labels of the documents."""
    for folder, log, count in zip(folders, logs, (1, 3), strict=True):
        found, means = check_evaluation(load_ranks(folder), corpus, SETS, shifted=True)
        note(host, tree.name, name, found)
        found.hold()
        assert len(means) == count
        logged = re.findall(r" (?:validation|test) \w+ at .*?lm.?loss value: (\S+)", log)
        assert [float(value) for value in logged] == pytest.approx(means, rel=2e-6)
