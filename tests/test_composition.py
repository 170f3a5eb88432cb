"""The synthetic length distributions and the rows of `make bench-composition` are reproduced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from composition import python_sources
from lengths import LAWS, PUBMED
from papers import blog
from papers.claims import Row, compared
from papers.recipes import atom_size, bucketllm, seamless
from papers.recipes.seamless import expect_seamless, measure_seamless

from megapack.packing import pack

pytestmark = pytest.mark.pages


def by_item(rows: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row.item, row.quantity): row for row in rows}


@pytest.mark.parametrize("name", list(LAWS))
def test_a_law_is_deterministic_and_a_small_corpus_begins_a_large_one(name: str) -> None:
    law = LAWS[name]
    large = law(300_000, seed=3)  # more than one block
    assert large.dtype == np.int32 and large.shape == (300_000,)
    assert large.min() >= 2
    assert np.array_equal(large[:1000], law(1000, seed=3))
    assert not np.array_equal(large[:1000], law(1000, seed=4))
    assert len(law(0)) == 0


def test_laws_have_the_means_and_the_limits_of_their_sources() -> None:
    count = 200_000
    fineweb = LAWS["fineweb_edu_like"](count)
    assert fineweb.min() >= 56 and fineweb.max() <= 131_072
    table_1 = {1024: 61.26, 2048: 38.39, 4096: 21.45, 8192: 11.51, 16384: 5.96}
    for capacity, percent in table_1.items():
        # A document of n tokens is cut where a boundary falls on one of its n - 1 inner gaps.
        cut = np.minimum(1.0, (fineweb - 1) / capacity).mean()
        assert 100 * cut == pytest.approx(percent, rel=0.01)
    means = {"fineweb_edu_like": 999, "pubmed": 5614, "bbc_news": 1274, "finance": 1765}
    means["web_800"] = 800
    for name, mean in means.items():
        assert LAWS[name](count).mean() == pytest.approx(mean, rel=0.03), name
    for name, shortest in {"pubmed": 2049, "bbc_news": 513, "finance": 513}.items():
        assert LAWS[name](count).min() == shortest


def test_section_4_8_comes_out_where_the_equations_decide() -> None:
    rows = by_item(seamless.section_4_8())
    assert rows["eq. 6 on Table 13", "texts that slide"].measured == pytest.approx(6716.9)
    assert rows["eq. 7 on Table 13", "short tokens, M"].measured == pytest.approx(2.649, rel=1e-3)
    slid = rows["seamless", "texts that slide"]
    lengths = LAWS["pubmed"](11_268)
    index = pack(lengths, "seamless", buckets=[2048], r_max=0.3)
    placed = np.bincount(index.segment_document, index.segment_length, minlength=len(lengths))
    assert slid.measured == np.count_nonzero(placed > lengths)  # who overlaps is placed twice
    short = index.segment_length[index.segment_length < 2048].sum()
    assert rows["seamless", "short tokens, M"].measured == pytest.approx(short / 1e6)


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


def test_figure_3_rises_and_falls_ever_more_slowly() -> None:
    rows = by_item(seamless.figure_3((0.1, 0.2, 0.3, 0.4, 0.5)))
    items = [f"r_max {r:g}" for r in (0.1, 0.2, 0.3, 0.4, 0.5)]
    texts = np.array([rows[item, "texts that slide"].measured for item in items])
    tokens = np.array([rows[item, "short tokens, M"].measured for item in items])
    assert (np.diff(texts) > 0).all() and (np.diff(texts, n=2) < 0).all()
    assert (np.diff(tokens) < 0).all() and (np.diff(tokens, n=2) > 0).all()


def test_bucketllm_table_1_comes_out_except_its_concatenation_ratio() -> None:
    rows = by_item(bucketllm.table_1(LAWS["fineweb_edu_like"](1_000_000), "law"))
    disagree = {key for key, row in rows.items() if row.agrees is False}
    assert disagree == {
        ("DD, pieces from 1 on", "r_tru %"),
        ("BucketLLM-v0 (pool 800, P 1)", "r_cat"),
        ("BucketLLM (pool 3000, P 0.045)", "r_cat"),
    }
    assert sum(row.agrees is True for row in rows.values()) >= 20
    ours, paper = (
        rows["bucket (the default)", "r_pad %"],
        rows["BucketLLM (pool 3000, P 0.045)", "r_pad %"],
    )
    assert ours.measured < paper.measured / 2


def test_speeds_by_context_length_are_predicted() -> None:
    assert all(row.agrees for row in bucketllm.speeds())


def test_steps_of_padding_follow_from_the_lengths() -> None:
    assert all(row.agrees for row in atom_size.table_3_steps())


def test_the_blogs_row_is_reproduced_and_its_means_refuted() -> None:
    rows = blog.padding_waste(50_000)
    assert all(row.agrees for row in rows if row.corpus == "web_blog_table")
    refuted = [row for row in rows if row.corpus in ("code, mean 300", "books, mean 50,000")]
    assert len(refuted) == 12 and not any(row.agrees for row in refuted)
    assert all(row.why for row in rows if row.agrees is False)


def _reasons() -> list[tuple[str, Callable[[Row], bool]]]:
    """Return the statement of a reason, and whether it holds; paper figures are repeated here."""
    pubmed, web, edu = LAWS["pubmed"](11_268), LAWS["web_800"](20_000), LAWS["fineweb_edu_like"]
    wide = LAWS["web_blog_table"](20_000)  # whose row "no packing" agrees
    expected = expect_seamless(PUBMED, 2048, 0.3)
    lengths = edu(100_000)
    ladder = {1024: 6.52, 2048: 16.58, 4096: 32.34, 8192: 27.17, 16384: 17.39}
    samples_per_token = sum(share / 100 / n for n, share in ladder.items())
    middle = lengths[(lengths > 4096) & (lengths <= 8192)]

    def all_dropped(row: Row) -> int:
        """Tokens, if every sample of seamless dropped c_extra."""
        name = row.corpus.split()[0]
        count, capacity, extra = seamless.CORPORA[name]
        options = {"r_max": 0.3, "last": "drop", "extra_capacity": extra}
        index = pack(LAWS[name](count), "seamless", buckets=[capacity], **options)
        return index.num_samples * extra

    return [
        # The measured figures follow the equations, which assume uniform lengths.
        (
            "lengths inside an interval are uniform here",
            lambda row: (
                abs(
                    {
                        "texts that slide": expected.num_sliding,
                        "texts that slide, %": 100 * expected.num_sliding / len(pubmed),
                        "short tokens, M": expected.short_tokens / 1e6,
                        "short tokens, % of all": 100 * expected.short_tokens / pubmed.sum(),
                    }[row.quantity]
                    / row.measured
                    - 1
                )
                < 0.05
            ),
        ),
        (
            "c tokens of nearly every stage-2 bin",
            lambda row: 0 < 1000 * row.measured < all_dropped(row),
        ),
        ("remainders are uniform here", lambda row: row.measured < row.paper),
        (
            "a mean of 800 fills 19.5 % at most; the row needs a mean of about 4,800",
            lambda row: 100 * web.mean() / 4096 < 20 and 4700 < wide.mean() < 4900,
        ),
        ("batches of 8 from documents sorted", lambda row: row.measured > 99),
        ("the blog's code splits documents", lambda row: row.measured > 99.9),
        (
            "no reading of the blog's code gives it",
            lambda row: (
                not any(
                    abs(other.measured - row.paper) <= 0.01 * row.paper
                    for other in blog.strategies(20_000)
                    if other.item in ("random packing, whole", "length-sorted")
                )
            ),
        ),
        ("follows the utilization without packing", lambda row: row.corpus == "web_800"),
        (
            "its cost means 5% of the peak, its speed 15%",
            lambda row: 2 < row.paper / row.measured < 4,
        ),
        ("2048 x 24 x $2 is $98,304", lambda row: round(1.2e6 / (0.3 * 2048 * 24 * 2)) == 41),
        (
            "the paper's shares mean r_cat 3.74",
            lambda row: round(1 / samples_per_token / 999, 2) == pytest.approx(3.74, abs=0.02),
        ),
        (
            "a sample of 8192 needs a document of 4097",
            lambda row: (
                row.paper > 100 * 8192 * len(middle) / lengths.sum(dtype=np.int64) > row.measured
                and f"{100 * 8192 * len(middle) / lengths.sum(dtype=np.int64):.1f} %" in row.why
            ),
        ),
    ]


def test_every_disagreement_has_a_reason_and_the_reason_is_true() -> None:
    rows = [
        *seamless.section_4_8(),
        *seamless.dropping(),
        *blog.strategies(20_000),
        *blog.costs(),
        *bucketllm.table_3(LAWS["fineweb_edu_like"](100_000), "law"),
    ]
    assert len(rows) > 50
    disagreeing = [row for row in rows if row.agrees is False]
    assert len(disagreeing) > 20
    reasons = _reasons()
    for row in disagreeing:
        (holds,) = (check for words, check in reasons if row.why.startswith(words))
        assert holds(row), row
    used = {words for words, _ in reasons for row in disagreeing if row.why.startswith(words)}
    assert used == {words for words, _ in reasons}


def test_a_row_judges_within_its_tolerance() -> None:
    def agrees(paper: float | None, measured: float, **options: float) -> bool | None:
        return compared("s", "c", "i", "q", (paper, measured), **options).agrees

    assert agrees(100, 104) is True
    assert agrees(100, 106) is False
    assert agrees(0.01, 0.0051, rounding=0.005) is True
    assert agrees(None, 7) is None
    assert agrees(1, 7, claimed=False) is None


def test_python_sources_are_a_corpus() -> None:
    name, lengths = python_sources(200)
    assert f"({len(lengths):,} files)" in name
    assert lengths.min() >= 2 and len(lengths) > 50


def test_a_limit_on_segments_costs_next_to_no_padding() -> None:
    """64 documents in 8,192 tokens: cu_seqlens of one length, as CUDA graphs need them."""
    documents = LAWS["fineweb_edu_like"](1_000_000)
    for buckets in ([8192], [1024, 2048, 4096, 8192]):
        index = pack(documents, "bucket", buckets=buckets, max_segments=64)
        assert index.metrics()["padding_ratio"] <= 0.001
        limits = np.repeat(index.bucket_capacity // 128, np.diff(index.bucket_sample_offsets))
        assert (np.diff(index.sample_segment_offsets) <= limits).all()
