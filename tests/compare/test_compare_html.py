"""The report is one well-formed file that needs nothing else and shows every strategy."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from megapack.compare import (
    GPUS,
    MODELS,
    Comparison,
    TrainingRun,
    compare,
    default_cases,
    parse_case,
)
from megapack.compare.evaluation import duration, money
from megapack.compare.page import render, to_json
from megapack.errors import ConfigError
from megapack.units import percent

RUN = TrainingRun(model=MODELS["125m"], gpu=GPUS["a100"], num_gpus=8, train_tokens=1e9)


def compared(name: str = "corpus", **options: object) -> Comparison:
    lengths = np.rint(np.exp(np.random.default_rng(0).normal(4, 1, 300))).clip(1).astype(np.int32)
    cases, _ = default_cases(buckets=[64, 128, 256], capacities=[64, 256])
    return compare(lengths, cases, run=RUN, name=name, tokens_per_rank=512, **options)


@pytest.fixture(scope="module")
def page() -> str:
    return render(compared())


class Nesting(HTMLParser):
    """Fails on a tag that is closed out of order; collects text and attributes."""

    VOID = frozenset({"meta"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, key, value) for key, value in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (self.open, tag)
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


def ids_of(parsed: Nesting) -> list[tuple[str, str, str | None]]:
    return [a for a in parsed.attributes if a[1] == "id"]


def test_tags_nest_and_all_are_closed(page: str) -> None:
    assert page.startswith("<!DOCTYPE html>")
    assert Nesting(page).open == []


def test_nothing_is_loaded_from_anywhere(page: str) -> None:
    parsed = Nesting(page)
    tags = {tag for tag, _, _ in parsed.attributes}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    named = [a for a in parsed.attributes if a[1] in ("src", "href", "xlink:href", "srcset")]
    assert {(tag, key) for tag, key, _ in named} == {("use", "href")}  # markers of the same plot
    assert all(value in {f"#{name}" for _, _, name in ids_of(parsed)} for _, _, value in named)
    assert not re.search(r"https?:|url\(|@import", page)
    assert "<script" not in page


def test_every_strategy_is_in_the_table_and_in_every_plot(page: str) -> None:
    num_plots = page.count("<svg ")
    assert num_plots == 6
    for evaluation in compared().evaluations:
        label = evaluation.label
        assert len(re.findall(f">{re.escape(label)}</text>", page)) == num_plots - 1, label
        assert f">{label}</th>" in page


def test_axes_have_names_with_units(page: str) -> None:
    text = " ".join(Nesting(page).text)
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


def test_the_figures_of_the_answer_are_those_of_the_metrics(page: str) -> None:
    comparison = compared()
    best = comparison.evaluations[comparison.recommendation.best]
    text = " ".join(Nesting(page).text)
    assert percent(best.metrics["padding_ratio"], None) in text
    assert f"{best.metrics['concatenation_ratio']:.2f}" in text
    for reason in comparison.recommendation.reasons:
        assert reason in text


def test_coordinates_are_finite_and_inside_the_picture(page: str) -> None:
    assert "nan" not in page.lower().replace("finance", "")
    assert "inf" not in re.sub(r"[a-z]*inf[a-z]+", "", page.lower())
    for value in re.findall(r' (?:x|y|x1|x2|y1|y2|cx|cy)="([^"]+)"', page):
        assert -1 <= float(value) <= 1100


def test_a_sample_is_said_to_be_one_and_a_whole_is_not(page: str) -> None:
    assert "random sample" not in page
    assert "random sample of 300 of 12,345 documents" in render(compared(sampled_from=12_345))


def test_a_name_cannot_smuggle_markup() -> None:
    page = render(compared("<script>alert(1)</script> & co"))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in page


def test_one_document_and_one_strategy_make_a_page_too() -> None:
    cases = default_cases(buckets=[64], capacities=[64])[0][:1]
    page = render(compare(np.array([5]), cases, run=RUN))
    assert Nesting(page).open == []
    assert "1</b> documents" in page


def test_json_holds_what_the_page_shows() -> None:
    comparison = compared(sampled_from=1000)
    tree = json.loads(json.dumps(to_json(comparison)))
    assert tree["corpus"]["sampled_from"] == 1000
    assert sum(tree["corpus"]["documents_per_interval"]) == 300
    for row, evaluation in zip(tree["strategies"], comparison.evaluations, strict=True):
        assert row["metrics"] == evaluation.metrics
        assert row["cost"]["gpu_hours"] == evaluation.breakdown.gpu_hours
        assert row["label"] == evaluation.label
    assert tree["recommendation"]["label"] in [row["label"] for row in tree["strategies"]]


def test_page_is_stable_and_needs_matplotlib(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    again = render(compared())
    assert re.sub(r"<td>[0-9.]+</td></tr>", "", again) == re.sub(
        r"<td>[0-9.]+</td></tr>", "", page
    )  # but for the seconds that packing took
    assert not re.search(r"20\d\d-\d\d-\d\d", page)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'megapack\[plot\]', or leave out --html"):
        render(compared())


def test_values_show_under_the_mouse_and_colours_follow_the_theme(page: str) -> None:
    best = compared().evaluations[compared().recommendation.best]
    assert f"<title>{best.label}: padding {100 * best.metrics['padding_ratio']:.6g} %" in page
    styles = page[page.index("</style>") :]
    assert "var(--blue)" in styles and not re.search(r"(fill|stroke): #(?!000000)", styles)


def test_money_and_durations_are_short() -> None:
    amounts = ["$0.50", "$999.99", "$1.23 k", "$1.23 M"]
    assert [money(v) for v in (0.5, 999.994, 1234, 1_234_567)] == amounts
    times = ["5.4 minutes", "5.0 hours", "48.0 hours", "10.0 days"]
    assert [duration(v) for v in (0.09, 5, 47.96, 240)] == times


def test_a_long_label_is_cut_in_plots_and_whole_in_the_table() -> None:
    text = "seamless@64:r_max=0.25,extra_capacity=5,placement=published"
    cases = parse_case(text, buckets=[], capacities=[])
    page = render(compare(np.array([50, 70, 99]), cases, run=RUN))
    whole = "seamless@64 r_max=0.25 extra_capacity=5 placement=published"
    assert f">{whole}</th>" in page
    assert f">{whole[:41]}...</text>" in page
