"""Seamless Packing's theory: the numbers of the paper, and what the strategy does beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from papers.composition.seamless import expect_seamless, measure_seamless

from megapack.packing import pack

pytestmark = pytest.mark.pages

# Table 13: PubMed documents with a length in (2048 k, 2048 (k + 1)], k = 1 ... 9.
PUBMED = [3906, 4095, 1789, 763, 355, 150, 73, 47, 90]


def test_equations_6_and_7_give_the_numbers_of_section_4_8() -> None:
    expected = expect_seamless(PUBMED, 2048, 0.3)
    assert int(expected.num_sliding) == 6716
    assert round(expected.short_tokens / 1e6, 1) == 2.6


def test_uniform_lengths_do_what_the_theory_expects() -> None:
    generator = np.random.default_rng(0)
    k = np.repeat(np.arange(1, 10), PUBMED)
    lengths = (2048 * k + 1 + generator.integers(0, 2048, len(k))).astype(np.int32)
    expected, measured = measure_seamless(lengths, 2048, 0.3)
    assert expected == expect_seamless(PUBMED, 2048, 0.3)
    assert measured.num_sliding == pytest.approx(expected.num_sliding, rel=0.02)
    assert measured.short_tokens == pytest.approx(expected.short_tokens, rel=0.05)


def test_what_is_measured_is_what_the_strategy_does() -> None:
    lengths = np.random.default_rng(1).integers(0, 200, 3000).astype(np.int32)
    _, measured = measure_seamless(lengths, 20, 0.25)
    index = pack(lengths, "seamless", buckets=20, r_max=0.25)
    begins = index.segment_begin
    # A window that begins off the grid of plain chunks can only be one of a document that slides.
    windows = (index.segment_length == 20) & (begins % 20 != 0)
    assert measured.num_sliding == len(set(index.segment_document[windows].tolist())) > 0


def test_a_ratio_that_means_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="r_max is 0; it must be above 0"):
        expect_seamless(PUBMED, 2048, 0)
