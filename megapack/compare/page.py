"""A comparison as one HTML page, and as JSON values.

* ``comparison_page(comparison)``: one self-contained HTML file, without scripts or network
* ``to_json(comparison)``: dicts and lists, as ``--json`` prints them
* ``document``, ``tiles_of``: parts that the page of a run (``megapack.cli.report``) uses, too

The text of the page is in templates/comparison.html.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from megapack import __version__
from megapack.compare import charts
from megapack.compare import evaluation as rules
from megapack.compare.comparison import Comparison
from megapack.compare.cost import NUM_STEPS
from megapack.compare.evaluation import Evaluation, TableColumn, columns_of, duration, money
from megapack.units import count, percent, short

TEMPLATES = Path(__file__).with_name("templates")
PLOTS = (
    charts.length_histogram,
    charts.trade_off,
    charts.tokens_per_bucket,
    charts.attention_cost,
    charts.rank_imbalance,
    charts.training_time,
)


def template(name: str) -> Template:
    """Return a template from a file of megapack/compare/templates."""
    return Template((TEMPLATES / name).read_text(encoding="utf-8"))


def document(title: str, body: str, *styles: str) -> str:
    """Return an HTML page in one file; ``styles`` are its stylesheets in templates, in order."""
    light, dark = (
        " ".join(f"--{name}: {colours[theme]};" for name, colours in charts.PALETTE.items())
        for theme in (0, 1)
    )
    style = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in styles)
    body = re.sub(r"(?<=\d) %", "&#160;%", body)  # no line break between a number and its unit
    return template("page.html").substitute(
        title=title, body=body, style=style, light=light, dark=dark
    )


def tiles_of(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Return the HTML of tiles (name, value, unit)."""
    return "".join(
        f"<div class='tile'><span>{name}</span><b>{escape(value)}</b>"
        f"<span>{escape(unit)}</span></div>"
        for name, value, unit in tiles
    )


def comparison_page(comparison: Comparison) -> str:
    """Return the page. Raises ConfigError if matplotlib is not installed."""
    corpus, run, recommendation = comparison.corpus, comparison.run, comparison.recommendation
    best = comparison.evaluations[recommendation.best]
    metrics, bill = best.metrics, best.breakdown
    left_out = [f"{escape(label)}: {escape(why)}" for label, why in comparison.left_out.items()]
    reasons = [*recommendation.reasons, *(f"{n}: {words}" for n, words in best.decisions.items())]
    rows = zip(comparison.evaluations, recommendation.out, strict=True)
    name = escape(corpus.name)
    gpus = f"{run.num_gpus} x {run.gpu.name.upper()}"
    columns = columns_of(comparison.evaluations)
    tiles = [
        ("padding", percent(metrics["padding_ratio"], None), "of positions"),
        ("truncated", percent(metrics["truncation_ratio"], None), "of documents"),
        ("concatenated", f"{metrics['concatenation_ratio']:.2f}", "documents per sample"),
        ("estimate", money(bill.cost), f"{duration(bill.hours)} on {gpus}"),
    ]
    if (second := metrics.get("second_padding_ratio")) is not None:
        tiles.insert(1, ("second padding", percent(second, None), "of the second capacities"))
    body = template("comparison.html").substitute(
        {plot.__name__: charts.draw(plot, comparison) for plot in PLOTS},
        name=name,
        num_documents=count(corpus.num_documents),
        num_tokens=short(corpus.num_tokens),
        mean=f"{corpus.mean:,.0f}",
        median=f"{corpus.median:,.0f}",
        longest=count(corpus.longest),
        sampled=""
        if corpus.sampled_from is None
        else f"<p class='note'>Measured on a random sample of {count(corpus.num_documents)} of "
        f"{count(corpus.sampled_from)} documents; every figure below describes the sample.</p>",
        best=escape(best.label),
        capacities=", ".join(map(count, best.case.buckets)),
        tiles=tiles_of(tiles),
        reasons="".join(f"<li>{escape(words)}</li>" for words in reasons),
        fixed=_fixed(comparison),
        left_out=f"<p>Left out: {'; '.join(left_out)}.</p>" if left_out else "",
        heads="".join(f"<th>{c.page_head}<small>{c.unit}</small></th>" for c in columns),
        rows="".join(_row(columns, evaluation, out, best) for evaluation, out in rows),
        num_ranks=comparison.num_ranks,
        tokens_per_rank=count(comparison.tokens_per_rank),
        num_steps=NUM_STEPS,
        **_calculation(comparison, best),
        gpus=gpus,
        max_dropped=percent(rules.MAX_DROPPED, None),
        max_extra=percent(rules.MAX_EXTRA_TRUNCATION, None),
        same_time=percent(rules.SAME_TIME, None),
        fewer_joined="fewer documents per sample, then " if run.attention == "sample" else "",
        version=__version__,
        seed=comparison.seed,
    )
    return document(f"Packing report: {name}", body, "page.css")


def _fixed(comparison: Comparison) -> str:
    """Return a sentence on the best strategy with one sample shape, unless it is recommended."""
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


def _row(columns: Sequence[TableColumn], evaluation: Evaluation, out: str, best: Evaluation) -> str:
    css = "chosen" if evaluation is best else "out" if out else ""
    name, *cells = (escape(column.cell(evaluation)) for column in columns)
    body = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr class='{css}'><th title='{escape(out, quote=True)}'>{name}</th>{body}</tr>"


def _calculation(comparison: Comparison, best: Evaluation) -> dict[str, str]:
    """Return the assumptions of the estimate, and its calculation for the recommended strategy."""
    run, model, bill = comparison.run, comparison.run.model, best.breakdown
    amount = (
        f"as many document tokens as the data has ({short(comparison.corpus.num_tokens)})"
        if run.train_tokens is None
        else f"{short(run.train_tokens)} document tokens "
        f"({bill.num_passes:.3g} passes over these lengths)"
    )
    scope = "inside documents" if run.attention == "document" else "over whole samples"
    if run.dealing == "random":
        scope += ", samples assigned to the ranks at random"
    positions = best.num_positions * bill.num_passes
    squares = bill.num_passes * sum(
        b.sample_squares if run.attention == "sample" else b.work for b in best.work
    )
    operations = model.flops_per_token * positions + model.flops_per_square * squares
    return {
        "parameters": short(model.parameters),
        "num_layers": str(model.num_layers),
        "width": f"{model.attention_width:,}",
        "amount": amount,
        "scope": scope,
        "utilization": f"{run.utilization:.0%}",
        "peak": f"{run.gpu.peak_flops / 1e12:,.0f}",
        "price": f"{run.price_per_gpu_hour:.2f}",
        "positions": short(positions),
        "squares": f"{squares:.3g}",
        "operations": f"{operations:.4g}",
        "waiting": percent(bill.waiting / bill.gpu_hours),
        "gpu_hours": short(bill.gpu_hours),
        "duration": duration(bill.hours),
        "num_gpus": str(run.num_gpus),
        "cost": money(bill.cost),
    }


def to_json(comparison: Comparison, prefix: str = "PREFIX") -> dict[str, Any]:
    """Return the comparison as JSON values, in the units of the dataclasses.

    Args:
        prefix: dataset in the command that packs it as recommended.
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
                prefix, comparison.seed, comparison.grouped_by, comparison.second_by
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
