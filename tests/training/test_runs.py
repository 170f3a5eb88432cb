"""Final perplexity, ranking and smoothing, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megapack.errors import DataError
from megapack.training.evaluation.comparison import Curve, read_curve, smooth, standings


def _curve(perplexities: list[float], steps_per_epoch: int) -> Curve:
    epoch = np.arange(len(perplexities) + 1) / steps_per_epoch
    return Curve(epoch, np.array(perplexities))


def test_the_last_epoch_decides_and_ranks_are_averaged_over_ranges() -> None:
    # Two epochs of 2 steps; in the last one a leads in its first half, b in its second.
    a = _curve([1.0, 1.0, 10.0, 40.0], 2)
    b = _curve([9.0, 9.0, 20.0, 30.0], 2)
    standing = standings({"a": a, "b": b}, num_ranges=4)
    assert standing["a"].mean_rank == standing["b"].mean_rank == 1.5
    assert (standing["a"].final_perplexity, standing["b"].final_perplexity) == (40.0, 30.0)
    better = standings({"a": a, "b": b, "c": _curve([5.0] * 40, 20)}, num_ranges=10)
    assert better["c"].mean_rank == 1.0 and better["a"].mean_rank == 2.5


def test_runs_with_other_numbers_of_steps_per_epoch_are_compared_by_epoch() -> None:
    coarse = _curve([4.0], 1)
    fine = _curve([float(i) for i in range(200)], 200)
    standing = standings({"coarse": coarse, "fine": fine})
    assert standing["coarse"].final_perplexity == 4.0
    assert standing["fine"].final_perplexity == pytest.approx(198.5)
    # fine is below 4 in the first two ranges (0.5, 2.5), above in the other 98
    assert standing["fine"].mean_rank == pytest.approx((2 * 1 + 98 * 2) / 100)


def test_equal_runs_share_a_rank() -> None:
    standing = standings({"a": _curve([2.0], 1), "b": _curve([2.0], 1)})
    assert standing["a"].mean_rank == standing["b"].mean_rank == 1.5


def test_runs_shorter_than_an_epoch_are_compared_over_what_all_have() -> None:
    """Of ``long`` only the first half counts, in which it is worse."""
    short = Curve(np.array([0.0, 0.25, 0.5]), np.array([3.0, 2.0]))
    standing = standings({"short": short, "long": _curve([9.0, 1.0], 1)})
    assert standing["short"].final_perplexity == 2.0 and standing["short"].mean_rank == 1.0
    assert standing["long"].final_perplexity == 9.0


def test_a_curve_is_read_from_the_log_and_a_cut_last_line_is_left_out(tmp_path: Path) -> None:
    lines = [
        {"step": i, "loss": math.log(i + 2), "epoch": i / 2, "epoch_end": (i + 1) / 2}
        for i in range(2)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "lo'
    (tmp_path / "log.jsonl").write_text(text)
    curve = read_curve(tmp_path)
    assert curve.perplexity.tolist() == pytest.approx([2.0, 3.0])
    assert curve.epoch.tolist() == [0.0, 0.5, 1.0]
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(DataError, match="has no steps"):
        read_curve(tmp_path)


def test_smoothing_is_unbiased_and_forgets() -> None:
    assert smooth([3.0, 3.0, 3.0], 0.9) == pytest.approx([3.0] * 3)
    assert smooth([1.0, 5.0], 0.0) == [1.0, 5.0]
    half = smooth([0.0, 1.0], 0.25)  # weight of the past: 0.5
    assert half == pytest.approx([0.0, (0.5 * 1) / 0.75])
    with pytest.raises(ValueError, match="within 0 and 1"):
        smooth([1.0], 2.0)
