"""What was found in the runs of every host: held to the documents, noted for the summary below.

``trained``, ``resumed`` and ``evaluated`` are what every host of rows must show, whatever it logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hosts.check import Findings, check_run, evaluated_labels, load_ranks
from tests.hosts.corpus import Corpus

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
    rows: int,
    layers: int,
    **how: Any,
) -> Findings:
    """Every call was right, rows 0 to ``rows`` were read, and attention was seen in all layers."""
    found = check_run(load_ranks(folder), corpus, **how)
    note(host, tree.name, layout, found)
    assert not found.problems, "\n".join(found.problems[:20])
    assert found.rows.keys() == set(range(rows))
    assert found.segments > found.calls > 0
    assert found.attentions >= layers * found.calls, "attention of every layer was noted"
    return found


def resumed(
    host: str,
    tree: Path,
    folders: Iterable[Path],
    corpus: Corpus,
    *,
    rows: int,
    remark: str = "",
    **how: Any,
) -> None:
    """Two steps, and behind them two steps of a run that went on; ``rows`` of a step."""
    before, after = (check_run(load_ranks(folder), corpus, **how) for folder in folders)
    note(host, tree.name, f"DP 2 to DP 1, resumed{remark}", after)
    assert not before.problems + after.problems
    assert before.rows.keys() == set(range(2 * rows))
    assert after.rows.keys() == set(range(2 * rows, 4 * rows))


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
    """An evaluation had every label once, and on all ranks the loss of the documents alone."""
    recorded = load_ranks(folder)
    found = check_run(recorded, corpus)
    note(host, tree.name, name, found)
    assert not found.problems, "\n".join(found.problems[:20])
    labels = evaluated_labels(recorded)
    assert labels == sorted(np.concatenate([text[1:] for text in texts]).tolist())
    told = re.findall(r"validated: (\S+) (\S+) (\d+)", log)
    assert len(told) == ranks
    for loss, expected, count in told:
        assert int(count) == len(labels)
        assert float(loss) == pytest.approx(float(expected), rel=tolerance)
