"""A comparison as one HTML page, and as JSON values.

* ``comparison_page(comparison)``: one self-contained HTML file, without scripts or network;
* ``to_json(comparison)``: dicts and lists, what ``--json`` prints;
* ``document``, ``tiles_of``: the parts that the page of a run has, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from megapack import __version__
from megapack.compare import charts
from megapack.compare.comparison import Comparison
from megapack.compare.cost import NUM_STEPS
from megapack.compare.evaluation import (
    COLUMNS,
    MAX_DROPPED,
    MAX_EXTRA_TRUNCATION,
    SAME_TIME,
    Evaluation,
    duration,
    money,
)
from megapack.units import count, percent, short

TEMPLATES = Path(__file__).with_name("templates")


def template(name: str) -> Template:
    """Template of a page, from a file of megapack/compare/templates."""
    return Template((TEMPLATES / name).read_text(encoding="utf-8"))


def document(title: str, body: str, *styles: str) -> str:
    """HTML page in one file; ``styles`` are the templates of its stylesheet, in their order."""
    light, dark = (
        " ".join(f"--{name}: {colours[theme]};" for name, colours in charts.PALETTE.items())
        for theme in (0, 1)
    )
    style = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in styles)
    return template("page.html").substitute(
        title=title, body=body, style=style, light=light, dark=dark
    )


def tiles_of(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Name, figure and unit of each."""
    return "".join(
        f"<div class='tile'><span>{name}</span><b>{escape(value)}</b>"
        f"<span>{escape(unit)}</span></div>"
        for name, value, unit in tiles
    )


PLOTS = (
    charts.length_histogram,
    charts.trade_off,
    charts.tokens_per_bucket,
    charts.attention_cost,
    charts.rank_imbalance,
    charts.training_time,
)


def comparison_page(comparison: Comparison) -> str:
    """The page. Raises ConfigError: matplotlib is not installed."""
    corpus, recommendation = comparison.corpus, comparison.recommendation
    best = comparison.evaluations[recommendation.best]
    left_out = [f"{escape(label)}: {escape(why)}" for label, why in comparison.left_out.items()]
    reasons = [*recommendation.reasons, *(f"{n}: {words}" for n, words in best.decisions.items())]
    name = escape(corpus.name)
    body = template("comparison.html").substitute(
        {plot.__name__: charts.draw(plot, comparison) for plot in PLOTS},
        name=name,
        facts=(
            f"<b>{count(corpus.num_documents)}</b> documents <b>{short(corpus.num_tokens)}</b> "
            f"tokens mean <b>{corpus.mean:,.0f}</b> median <b>{corpus.median:,.0f}</b> longest "
            f"<b>{count(corpus.longest)}</b>"
        ),
        sampled=""
        if corpus.sampled_from is None
        else f"<p class='note'>Measured on a random sample of {count(corpus.num_documents)} of "
        f"{count(corpus.sampled_from)} documents; every figure below is of the sample.</p>",
        best=escape(best.label),
        capacities=", ".join(map(count, best.case.buckets)),
        tiles=tiles_of(_tiles(comparison, best)),
        reasons="".join(f"<li>{escape(words)}</li>" for words in reasons),
        fixed=_fixed(comparison),
        left_out=f"<p>Left out: {'; '.join(left_out)}.</p>" if left_out else "",
        heads="".join(f"<th>{name}<small>{unit}</small></th>" for _, name, unit, _ in COLUMNS),
        rows="".join(_row(comparison, i) for i in range(len(comparison.evaluations))),
        num_ranks=comparison.num_ranks,
        tokens_per_rank=count(comparison.tokens_per_rank),
        num_steps=NUM_STEPS,
        assumptions=_assumptions(comparison, best),
        example=_example(comparison, best),
        max_dropped=percent(MAX_DROPPED, None),
        max_extra=percent(MAX_EXTRA_TRUNCATION, None),
        same_time=percent(SAME_TIME, None),
        fewer_joined="fewer documents per sample, then "
        if comparison.run.attention == "sample"
        else "",
        version=__version__,
        seed=comparison.seed,
    )
    return document(f"Packing report: {name}", body, "page.css")


def _tiles(comparison: Comparison, best: Evaluation) -> tuple[tuple[str, str, str], ...]:
    """Name, figure and unit."""
    metrics, bill, run = best.metrics, best.breakdown, comparison.run
    on = f"{duration(bill.hours)} on {run.num_gpus} x {run.gpu.name.upper()}"
    return (
        ("padding", percent(metrics["padding_ratio"], None), "of positions"),
        ("truncated", percent(metrics["truncation_ratio"], None), "of documents"),
        ("concatenated", f"{metrics['concatenation_ratio']:.2f}", "documents per sample"),
        ("estimate", money(bill.cost), on),
    )


def _fixed(comparison: Comparison) -> str:
    fixed = comparison.recommendation.best_fixed
    if fixed is None or fixed == comparison.recommendation.best:
        return ""
    other = comparison.evaluations[fixed]
    return (
        "<p class='note'>If the trainer accepts only one sample shape: "
        f"<b>{escape(other.label)}</b> ({percent(other.metrics['padding_ratio'], None)} padding, "
        f"{percent(other.metrics['truncation_ratio'], None)} truncated, "
        f"{other.metrics['concatenation_ratio']:.2f} documents per sample).</p>"
    )


def _row(comparison: Comparison, i: int) -> str:
    evaluation, out = comparison.evaluations[i], comparison.recommendation.out[i]
    css = "chosen" if i == comparison.recommendation.best else "out" if out else ""
    name, *cells = (escape(cell(evaluation)) for *_, cell in COLUMNS)
    body = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr class='{css}'><th title='{escape(out, quote=True)}'>{name}</th>{body}</tr>"


def _assumptions(comparison: Comparison, best: Evaluation) -> str:
    run = comparison.run
    amount = (
        f"as many document tokens as the data has ({short(comparison.corpus.num_tokens)})"
        if run.train_tokens is None
        else f"{short(run.train_tokens)} document tokens "
        f"({best.breakdown.num_passes:.3g} passes over these lengths)"
    )
    scope = "inside documents" if run.attention == "document" else "over whole samples"
    if run.dealing == "random":
        scope += ", samples dealt to the ranks at random"
    return (
        f"A model of {short(run.model.parameters)} parameters, {run.model.num_layers} "
        f"layers, attention width {run.model.attention_width:,}; {amount}; attention {scope}; "
        f"{run.num_gpus} x {run.gpu.name.upper()} at {run.utilization:.0%} of "
        f"{run.gpu.peak_flops / 1e12:,.0f} TFLOP/s and ${run.price_per_gpu_hour:.2f} per GPU hour. "
        "The bars say what the hours are spent on; a bar marked // is cut."
    )


def _example(comparison: Comparison, best: Evaluation) -> str:
    run, bill = comparison.run, best.breakdown
    model = run.model
    positions = best.num_positions * bill.num_passes
    squares = bill.num_passes * sum(
        b.sample_squares if run.attention == "sample" else b.work for b in best.work
    )
    return (
        f"For <b>{escape(best.label)}</b>: 6 &times; {short(model.parameters)} &times; "
        f"{short(positions)} + 7 &times; {model.num_layers} &times; "
        f"{model.attention_width:,} &times; {squares:.3g} = "
        f"{model.flops_per_token * positions + model.flops_per_square * squares:.4g} operations; "
        f"with {percent(bill.waiting / bill.gpu_hours)} of waiting, {short(bill.gpu_hours)} GPU "
        f"hours = {duration(bill.hours)} on {run.num_gpus} GPUs = {money(bill.cost)}."
    )


def to_json(comparison: Comparison, prefix: str = "PREFIX") -> dict[str, Any]:
    """The comparison as JSON values; units are those of the dataclasses' documentation.

    Args:
        prefix: of the dataset, for the command that packs it as recommended.
    """
    corpus = dataclasses.asdict(comparison.corpus)
    for name in ("edges", "documents_per_interval", "tokens_per_interval"):
        corpus[name] = corpus[name].tolist()
    recommendation = comparison.recommendation
    fixed = recommendation.best_fixed
    labels = [evaluation.label for evaluation in comparison.evaluations]
    return {
        "megapack": __version__,
        "corpus": corpus,
        "run": dataclasses.asdict(comparison.run),
        "num_ranks": comparison.num_ranks,
        "tokens_per_rank": comparison.tokens_per_rank,
        "seed": comparison.seed,
        "strategies": [
            {**_evaluation(evaluation), "excluded": why}
            for evaluation, why in zip(comparison.evaluations, recommendation.out, strict=True)
        ],
        "planned_steps": [dataclasses.asdict(planned) for planned in comparison.planned],
        "left_out": comparison.left_out,
        "recommendation": {
            "label": labels[recommendation.best],
            "command": comparison.evaluations[recommendation.best].case.command(
                prefix, comparison.seed, comparison.grouped_by
            ),
            "fixed_length": None if fixed is None else labels[fixed],
            "reasons": list(recommendation.reasons),
        },
    }


def _evaluation(evaluation: Evaluation) -> dict[str, Any]:
    bill = evaluation.breakdown
    sums = {name: getattr(bill, name) for name in ("gpu_hours", "hours", "cost")}
    return {
        "label": evaluation.label,
        "strategy": evaluation.case.strategy,
        "buckets": list(evaluation.case.buckets),
        "parameters": dict(evaluation.case.parameters),
        "decisions": evaluation.decisions,
        "seconds": evaluation.seconds,
        "metrics": evaluation.metrics,
        "work": [dataclasses.asdict(bucket) for bucket in evaluation.work],
        "cost": dataclasses.asdict(bill) | sums,
    }
