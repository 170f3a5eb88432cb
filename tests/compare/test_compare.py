"""Comparison of strategies: figures come from the index, the recommendation follows its rule."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import cache
from html import escape
from typing import Literal

import numpy as np
import pytest
from html_pages import Nesting, assert_stands_alone, words_of

from megapack.compare import (
    GPUS,
    MODELS,
    Case,
    Comparison,
    Corpus,
    Evaluation,
    TrainingRun,
    compare,
    default_cases,
    parse_case,
    recommend,
)
from megapack.compare.evaluation import duration, money
from megapack.compare.page import comparison_page
from megapack.errors import ConfigError, DataError
from megapack.packing import STRATEGIES
from megapack.units import percent

RUN = TrainingRun(model=MODELS["125m"], gpu=GPUS["a100"], num_gpus=8)
BUCKETS = [64, 128, 256]


def lengths(count: int = 400, seed: int = 3) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.rint(np.exp(generator.normal(4, 0.9, count))).clip(1).astype(np.int32)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    cases, _ = default_cases(buckets=BUCKETS, capacities=[64, 256])
    return compare(lengths(), cases, run=RUN, seed=5, tokens_per_rank=512)


# ---- Cases


def test_default_cases_are_all_strategies() -> None:
    cases, left_out = default_cases(buckets=BUCKETS, capacities=[64, 256])
    labels = [case.label for case in cases]
    expected = []
    for name, strategy in STRATEGIES.items():
        expected += [name] if strategy.many_buckets else [f"{name}@64", f"{name}@256"]
    assert labels == expected and not left_out


def test_a_case_can_name_capacities_and_parameters() -> None:
    (one,) = parse_case("concat@96:last=drop", buckets=BUCKETS, capacities=[64])
    assert one == Case(
        label="concat@96 last=drop", strategy="concat", buckets=(96,), parameters={"last": "drop"}
    )
    (many,) = parse_case("bucket@32+512+64:promote=on", buckets=BUCKETS, capacities=[64])
    assert many.buckets == (32, 64, 512)
    assert many.parameters == {"promote": "on"}  # not YAML's boolean
    assert not many.is_fixed_length
    (inherited,) = parse_case("bucket", buckets=[256, 64], capacities=[1])
    assert (inherited.label, inherited.buckets) == ("bucket", (64, 256))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bukket", "no packing strategy 'bukket'; did you mean 'bucket'"),
        ("concat@12x", "'12x' is not a capacity"),
        ("concat:last", "'last' is not of the form key=value"),
        ("concat:last=[", "'\\[' is not a value of last"),
        ("concat:lst=drop", "has no parameter 'lst'; did you mean 'last'"),
        ("concat:last=keep", "last is 'keep'; it must be one of"),
        ("concat@64+128", "has samples of one length; buckets is"),
        ("bucket:preset=nobody", "has no preset 'nobody'"),
    ],
)
def test_wrong_cases_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_case(text, buckets=BUCKETS, capacities=[64])


# ---- Figures


def test_work_adds_up_to_the_metrics(comparison: Comparison) -> None:
    assert len(comparison.evaluations) > len(STRATEGIES)
    for evaluation in comparison.evaluations:
        metrics = evaluation.metrics
        assert sum(b.num_samples for b in evaluation.work) == metrics["num_samples"]
        assert sum(b.segment_squares for b in evaluation.work) == metrics["attention_cost"]
        assert sum(b.sample_squares for b in evaluation.work) == metrics["attention_cost_sample"]
        assert evaluation.num_positions == metrics["placed_tokens"] + metrics["padding_tokens"]
        assert evaluation.mean_context <= evaluation.mean_sample_context
        assert evaluation.breakdown.padding >= 0
        assert 1 <= evaluation.imbalance("balanced") <= evaluation.imbalance("random")


def test_cost_follows_the_formula(comparison: Comparison) -> None:
    """6 N positions + 7 layers width (squares of segments and of paddings), and the waiting."""
    for evaluation in comparison.evaluations:
        work = sum(b.work for b in evaluation.work)
        operations = RUN.model.flops_per_token * evaluation.num_positions
        operations += RUN.model.flops_per_square * work * evaluation.imbalance("balanced")
        passes = evaluation.metrics["num_tokens"] / (
            evaluation.metrics["num_tokens"] - evaluation.metrics["dropped_tokens"]
        )
        hours = passes * operations / (3600 * 312e12 * 0.4)
        assert evaluation.breakdown.gpu_hours == pytest.approx(hours)
        assert evaluation.breakdown.cost == pytest.approx(2 * hours)


def test_corpus_counts_every_document_and_token_once() -> None:
    values = np.array([0, 1, 1, 2, 3, 70, 4096], np.int64)
    corpus = Corpus.of(values, name="few")
    assert (corpus.num_documents, corpus.num_tokens, corpus.longest) == (7, 4173, 4096)
    assert corpus.documents_per_interval.sum() == 6  # the empty document is in no interval
    assert corpus.tokens_per_interval.sum() == 4173
    top = np.flatnonzero(corpus.documents_per_interval)[-1]
    assert corpus.edges[top] <= 4096 < corpus.edges[top + 1]


@pytest.mark.parametrize("nothing", [[], [0, 0]])
def test_empty_comparison_is_an_error(nothing: list[int]) -> None:
    cases, _ = default_cases(buckets=BUCKETS, capacities=[64])
    with pytest.raises(DataError, match="holds no document with a token"):
        compare(np.array(nothing, np.int32), cases, run=RUN)
    with pytest.raises(ConfigError, match="no strategy to compare"):
        compare(lengths(), [], run=RUN)


def test_strategy_that_drops_all_tokens_is_left_out() -> None:
    seven = np.array([7])
    cases, _ = default_cases(buckets=[1024], capacities=[1024])
    comparison = compare(seven, cases, run=RUN)
    assert comparison.left_out == {"decompose": "it drops every token"}  # 7 < 256
    assert len(comparison.evaluations) == len(cases) - 1
    with pytest.raises(DataError, match="no strategy places a token"):
        compare(seven, parse_case("decompose", buckets=[1024], capacities=[]), run=RUN)


# ---- Recommendation


@cache
def one_evaluation() -> Evaluation:
    case = parse_case("concat", buckets=BUCKETS, capacities=[64])[0]
    return compare(lengths(20), [case], run=RUN).evaluations[0]


def made_up(
    label: str,
    *,
    truncated: float = 0.0,
    dropped: float = 0.0,
    hours: float = 10.0,
    joined: float = 2.0,
    padded: float = 0.0,
    buckets: tuple[int, ...] = (64,),
) -> Evaluation:
    """Return an evaluation with only the values that the rule reads."""
    base = one_evaluation()
    metrics = {
        **base.metrics,
        "truncation_ratio": truncated,
        "num_truncated_documents": round(1e6 * truncated),
        "truncation_floor": 0.002,
        "dropped_ratio": dropped,
        "concatenation_ratio": joined,
        "padding_ratio": padded,
    }
    bill = replace(
        base.breakdown,
        tokens=hours,
        repeated=0.0,
        padding=0.0,
        attention=0.0,
        cross_attention=0.0,
        waiting=0.0,
    )
    named = Case(label=label, strategy="bucket", buckets=buckets)
    return replace(base, case=named, metrics=metrics, breakdown=bill)


def choice(*evaluations: Evaluation, attention: Literal["document", "sample"] = "document") -> str:
    return evaluations[recommend(evaluations, attention).best].label


def test_the_least_time_wins_among_those_that_keep_documents_whole() -> None:
    assert choice(made_up("slow", hours=12), made_up("fast", hours=11)) == "fast"
    cheap_but_splits = made_up("splits", hours=5, truncated=0.4)
    cheap_but_loses = made_up("loses", hours=5, dropped=0.01)
    result = recommend([cheap_but_splits, made_up("whole"), cheap_but_loses])
    assert result.best == 1
    assert result.out == ("splits 40 % of the documents", "", "drops 1 % of the tokens")
    cheaper = "loses drops 1 % of the tokens; splits splits 40 % of the documents"
    assert f"Cheaper, but excluded: {cheaper}." in result.reasons


def test_within_half_a_percent_of_time_fewer_cut_then_less_padding_wins() -> None:
    """If attention crosses documents, fewer documents per sample come first."""
    many, few = made_up("many", hours=10.0, joined=16.0), made_up("few", hours=10.04, joined=2.2)
    assert choice(many, few, attention="sample") == "few"
    slow = made_up("too slow", hours=10.06, joined=2.2)
    assert choice(many, slow, attention="sample") == "many"
    assert choice(many, made_up("few, padded", joined=2.2, padded=0.001)) == "many"
    assert choice(made_up("cuts", truncated=0.003), made_up("pads", padded=0.001)) == "pads"
    assert choice(made_up("pads", padded=0.01), made_up("full", padded=0.001)) == "full"


def test_unavoidable_splits_do_not_exclude() -> None:
    floor = made_up("floor", truncated=0.002, hours=11)
    assert choice(floor, made_up("x", truncated=0.1)) == "floor"


def test_if_all_are_excluded_the_fewest_splits_win() -> None:
    result = recommend(
        [
            made_up("most", truncated=0.9, hours=1),
            made_up("fewest", truncated=0.3, hours=9),
            made_up("loses", truncated=0.1, dropped=0.5, hours=1),
        ]
    )
    assert result.best == 1
    assert result.reasons[0].endswith("every strategy; this one splits 30 % of the documents.")
    assert choice(made_up("a", dropped=0.5, hours=2), made_up("b", dropped=0.4, hours=1)) == "b"


def test_best_fixed_length_strategy_is_named() -> None:
    bucket = made_up("bucket", hours=9, buckets=(64, 128))
    assert (
        recommend([made_up("fixed", hours=11), bucket, made_up("slower", hours=12)]).best_fixed == 0
    )
    assert recommend([bucket]).best_fixed is None


def test_reasons_compare_the_rivals() -> None:
    reasons = recommend([made_up("first", hours=10), made_up("second", hours=11)]).reasons
    assert "second, the next best, would take 10 % more time." in reasons
    best = made_up("best", joined=1.5, buckets=(64, 128))
    near = made_up("near", joined=3.25, buckets=(64, 128))
    reasons = recommend([best, near, made_up("fixed", hours=12)], "sample").reasons
    same_time = "near, the next best, would take the same time"
    assert f"{same_time} but concatenates 3.25 documents per sample." in reasons
    assert "fixed, the best with one sample shape, would take 20 % more time." in reasons


@pytest.mark.parametrize(
    ("worse", "words"),
    [
        ({"truncated": 0.004}, "but splits 0.4 % of the documents"),
        ({"padded": 0.02}, "but pads 2 %"),
        ({}, "and is as good"),
    ],
)
def test_rival_of_equal_time_gets_its_disadvantage(worse: dict[str, float], words: str) -> None:
    reasons = recommend([made_up("best"), made_up("rival", **worse)]).reasons
    assert reasons[2] == f"rival, the next best, would take the same time {words}."


# ---- Page


@pytest.fixture(scope="module")
def page(comparison: Comparison) -> str:
    return comparison_page(comparison)


@pytest.fixture(scope="module")
def small() -> Comparison:
    """Compare two strategies, so that the page is drawn quickly."""
    cases = [parse_case(text, buckets=BUCKETS, capacities=[64])[0] for text in ("bucket", "pad")]
    return compare(lengths(), cases, run=RUN, tokens_per_rank=512)


def test_page_is_self_contained(page: str) -> None:
    assert_stands_alone(page)
    assert not re.search(r"20\d\d-\d\d-\d\d", page), "the same bytes tomorrow"
    for value in re.findall(r' (?:x|y|x1|x2|y1|y2|cx|cy)="([^"]+)"', page):
        assert -1 <= float(value) <= 1100


def test_every_strategy_is_in_the_table_and_in_every_plot(
    page: str, comparison: Comparison
) -> None:
    num_plots = page.count("<svg ")
    assert num_plots == 6
    for evaluation in comparison.evaluations:
        label = evaluation.label
        assert len(re.findall(f">{re.escape(label)}</text>", page)) == num_plots - 1, label
        assert f">{label}</th>" in page


def test_axes_have_names_with_units(page: str) -> None:
    text = words_of(page)
    for words in (
        "document length (tokens, log scale)",
        "share of token positions (%)",
        "mean of squared length per position (tokens)",
        "attention work of the busiest rank / mean of the ranks",
        "GPU hours",
        "% of documents",
        "documents per sample",
    ):
        assert words in text, words


def test_page_shows_the_metrics_of_the_recommendation(page: str, comparison: Comparison) -> None:
    best = comparison.evaluations[comparison.recommendation.best]
    text = words_of(page)
    assert percent(best.metrics["padding_ratio"], None) in text
    assert f"{best.metrics['concatenation_ratio']:.2f}" in text
    for reason in comparison.recommendation.reasons:
        assert reason in text
    assert not re.search(r"\d %", page), "a line may break between a number and its unit"
    assert f"<title>{best.label}: padding {100 * best.metrics['padding_ratio']:.6g}&#160;%" in page


def test_page_states_the_applied_rule(small: Comparison) -> None:
    """Documents per sample count only if attention crosses documents."""
    rule = "fewer split documents, then less padding"
    for attention, says in (("document", False), ("sample", True)):
        run = replace(RUN, attention=attention)
        text = words_of(comparison_page(replace(small, run=run)))
        assert rule in text and (f"fewer documents per sample, then {rule}" in text) == says


def test_page_escapes_the_name_of_the_corpus(page: str, small: Comparison) -> None:
    assert "random sample" not in page
    name = "<script>alert(1)</script> & co"
    corpus = replace(small.corpus, name=name, sampled_from=12_345)
    other = comparison_page(replace(small, corpus=corpus))
    assert "random sample of 400 of 12,345 documents" in other
    assert "<script" not in other and escape(name) in other


def test_one_document_and_one_strategy_make_a_page_too() -> None:
    """Its label is cut in plots and complete in the table."""
    text = "seamless@64:r_max=0.25,extra_capacity=5,placement=published"
    case = parse_case(text, buckets=[], capacities=[])
    page = comparison_page(compare(np.array([5]), case, run=RUN))
    assert Nesting(page).open == []
    assert "1</b> documents" in page
    whole = "seamless@64 r_max=0.25 extra_capacity=5 placement=published"
    assert f">{whole}</th>" in page
    assert f">{whole[:41]}...</text>" in page


def test_page_is_stable_and_needs_matplotlib(
    small: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert comparison_page(small) == comparison_page(small)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib, or leave out the page"):
        comparison_page(small)


def test_money_and_durations_are_short() -> None:
    amounts = ["under $1", "$999.99", "$1.23 k", "$1.23 M"]
    assert [money(v) for v in (0.5, 999.994, 1234, 1_234_567)] == amounts
    times = ["5.4 minutes", "5.0 hours", "48.0 hours", "10.0 days"]
    assert [duration(v) for v in (0.09, 5, 47.96, 240)] == times
