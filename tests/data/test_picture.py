"""Pictures of samples and steps in notebooks have a part for each document, and the padding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapack import IndexedDatasetBuilder, PackedDataset, Schedule, pack
from megapack.data.picture import Bar, picture

LENGTHS = np.array([5, 3, 40, 17, 60, 9, 30, 30])


def opened(tmp_path: Path, framework: Any = "torch") -> PackedDataset:
    with IndexedDatasetBuilder(tmp_path / "docs") as builder:
        for length in LENGTHS:
            builder.add_document(range(1, length + 1))
    index = pack(LENGTHS, buckets=[32, 64])
    return PackedDataset(tmp_path / "docs", index, framework=framework)


def parts(html: str) -> tuple[list[int], list[int]]:
    """Return the lengths of documents and of padding in a picture."""
    pieces = [int(n.replace(",", "")) for n in re.findall(r"title='([\d,]+) tokens'", html)]
    return pieces, [int(n) for n in re.findall(r"title='(\d+) of padding'", html)]


@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_a_sample_shows_its_documents_and_its_padding(tmp_path: Path, framework: str) -> None:
    data = opened(tmp_path, framework)
    shown = []
    for i in range(len(data)):
        sample = data[i]
        html = sample._repr_html_()  # type: ignore[attr-defined]
        pieces, padding = parts(html)
        assert pieces == [n for _, _, n in data.samples.segments(i)[1]]
        assert sum(pieces) + sum(padding) == len(sample["tokens"])
        labeled = float(np.mean(np.asarray(sample["loss_mask"]) != 0))
        assert f"{labeled:.1%} of the positions" in html
        shown += pieces
    assert sorted(shown) == sorted(LENGTHS), "every document, whole"


def test_a_step_shows_its_samples(tmp_path: Path) -> None:
    data = opened(tmp_path)
    schedule = Schedule(data, tokens_per_step=64)
    for i in range(schedule.num_steps()):
        step = schedule.step(i)
        html = step._repr_html_()
        assert f"step {i}" in html and "more" not in html
        ids = [int(n) for n in re.findall(r"sample (\d+)<", html)]
        assert ids == step.sample_ids.tolist()
        pieces, padding = parts(html)
        assert sum(pieces) + sum(padding) == 64


def test_a_long_step_is_cut_and_text_is_escaped() -> None:
    html = picture("a <b>", [Bar(f"<{i}>", 4, [3]) for i in range(100)], 100)
    assert "and 68 more" in html and html.count("3 tokens") == 32
    assert "<b>" not in html and "&lt;31&gt;" in html
