"""Lengths of documents that do not exist yet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megapack.errors import ConfigError, DataError
from megapack.training.engine.inputs import read_lengths


def test_a_law_has_the_mean_and_the_median_that_it_was_asked_for() -> None:
    lengths = read_lengths("lognormal:999,603,2e5", seed=1)
    assert len(lengths) == 200_000 and lengths.min() >= 1
    assert lengths.mean() == pytest.approx(999, rel=0.02)
    assert np.median(lengths) == pytest.approx(603, rel=0.02)
    assert np.array_equal(lengths, read_lengths("lognormal:999,603,2e5", seed=1))


@pytest.mark.parametrize("law", ["lognormal:999,603", "lognormal:3,9,10", "lognormal:a,b,c"])
def test_a_law_that_is_none_is_refused(law: str) -> None:
    with pytest.raises(ConfigError):
        read_lengths(law, seed=0)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 2)))
    with pytest.raises(DataError, match="one-dimensional"):
        read_lengths(str(tmp_path / "x.npy"), seed=0)
    (tmp_path / "y.npy").write_text("no numbers")
    with pytest.raises(DataError, match=r"not a \.npy file"):
        read_lengths(str(tmp_path / "y.npy"), seed=0)
