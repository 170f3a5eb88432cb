"""Comparison -> plain dicts and lists for ``--json``: what the table and the page show."""

from __future__ import annotations

import dataclasses
from html import escape
from typing import Any

from megapack import __version__
from megapack.compare import charts
from megapack.compare.charts import Drawing
from megapack.compare.comparison import Comparison
from megapack.compare.cost import NUM_STEPS
from megapack.compare.evaluation import (
    MAX_DROPPED,
    MAX_EXTRA_TRUNCATION,
    SAME_TIME,
    Evaluation,
    duration,
    money,
    percent,
    short_number,
)

# ---- The report's stylesheet. Light and dark follow the reader's system; system fonts only ------

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1c2430; --soft: #5b6675; --rule: #e3e7ec; --card: #f5f7fa;
  --c0: #9aa5b1; --c1: #2463c5; --c2: #16877a; --c3: #d9772b; --c4: #b9c0c9; --c5: #8a5cc2;
  --c6: #c43d53;
  --r0: #cfe3f7; --r1: #a3c9ee; --r2: #6fa8e0; --r3: #3f83cd; --r4: #2463c5; --r5: #184793;
  --r6: #10316a; --r7: #0a1f45; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #12161c; --ink: #e6eaf0; --soft: #9aa6b5; --rule: #2a323d; --card: #1a2029;
  --c0: #66717f; --c1: #5b9bf0; --c2: #35b5a4; --c3: #ee9650; --c4: #4b5563; --c5: #ae86e0;
  --c6: #e8667c;
  --r0: #16324f; --r1: #1d4878; --r2: #2660a3; --r3: #3a7fcc; --r4: #5b9bf0; --r5: #8ab8f5;
  --r6: #b4d2f9; --r7: #dbe9fc; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 48px 28px 72px; }
header { border-bottom: 1px solid var(--rule); padding-bottom: 18px; margin-bottom: 30px; }
h1 { font-size: 30px; line-height: 1.2; margin: 2px 0 10px; letter-spacing: -0.01em;
  overflow-wrap: anywhere; }
h2 { font-size: 21px; margin: 0 0 6px; letter-spacing: -0.005em; }
section { margin: 0 0 46px; }
section > p { color: var(--soft); max-width: 78ch; margin: 0 0 14px; }
.kicker { margin: 0; color: var(--soft); font-size: 13px; letter-spacing: 0.08em;
  text-transform: uppercase; }
.facts { margin: 0; color: var(--soft); word-spacing: 0.12em; }
.facts b { color: var(--ink); font-variant-numeric: tabular-nums; }
.note { color: var(--soft); font-size: 15px; margin: 10px 0 0; }
.answer { background: var(--card); border-left: 4px solid var(--c1); border-radius: 6px;
  padding: 20px 26px 18px; }
.answer h2 { font-size: 27px; color: var(--c1); margin: 0 0 14px; }
.answer h2 small { font-size: 15px; font-weight: 400; color: var(--soft); margin-left: 8px; }
.answer ul { margin: 16px 0 0; padding-left: 20px; }
.answer li { margin: 3px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px; }
.tile { background: var(--paper); border: 1px solid var(--rule); border-radius: 6px;
  padding: 10px 14px; display: flex; flex-direction: column; }
.tile span { color: var(--soft); font-size: 13px; }
.tile b { font-size: 24px; line-height: 1.3; font-variant-numeric: tabular-nums; }
figure { margin: 0; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 720px; height: auto;
  font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
svg text { fill: var(--ink); }
svg .tick, svg .small { fill: var(--soft); font-size: 11.5px; }
svg .small { font-size: 10.5px; }
svg .name { fill: var(--soft); }
svg .head { font-weight: 600; font-size: 13.5px; }
svg .row { font-size: 13px; }
svg .chosen { font-size: 13px; font-weight: 700; fill: var(--c1); }
svg .value { font-size: 12px; font-variant-numeric: tabular-nums; }
svg .cut { font-weight: 700; fill: var(--paper); stroke: var(--ink); stroke-width: 0.4; }
.grid { stroke: var(--rule); stroke-width: 1; }
.axis { stroke: var(--soft); stroke-width: 1; }
.mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 4; }
.stem { stroke: var(--rule); stroke-width: 2; }
.link { stroke: var(--c0); stroke-width: 3; opacity: 0.6; }
.s3 { stroke: var(--c3); stroke-width: 2.2; fill: none; }
.c0 { fill: var(--c0); } .c1 { fill: var(--c1); } .c2 { fill: var(--c2); } .c3 { fill: var(--c3); }
.c4 { fill: var(--c4); } .c5 { fill: var(--c5); } .c6 { fill: var(--c6); }
.faint2 { fill: var(--c2); opacity: 0.45; } .faint3 { fill: var(--c3); opacity: 0.45; }
.r0 { fill: var(--r0); } .r1 { fill: var(--r1); } .r2 { fill: var(--r2); } .r3 { fill: var(--r3); }
.r4 { fill: var(--r4); } .r5 { fill: var(--r5); } .r6 { fill: var(--r6); } .r7 { fill: var(--r7); }
svg .onr0, svg .onr1, svg .onr2 { fill: var(--ink); font-size: 11.5px; }
svg .onr3, svg .onr4, svg .onr5, svg .onr6, svg .onr7 { fill: var(--paper); font-size: 11.5px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 12.5px;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 6px; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
tbody th { font-weight: 500; white-space: normal; min-width: 150px; }
th:first-child { text-align: left; }
thead th { vertical-align: bottom; font-weight: 600; border-bottom: 1.5px solid var(--soft); }
thead small { display: block; color: var(--soft); font-weight: 400; font-size: 11px; }
tr.chosen { background: var(--card); } tr.chosen th { color: var(--c1); font-weight: 700; }
tr.out th { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 8px 22px; margin: 0 0 16px; }
dt { font-weight: 600; } dd { margin: 0; }
dd small { display: block; color: var(--soft); max-width: 80ch; }
footer { border-top: 1px solid var(--rule); padding-top: 14px; color: var(--soft);
  font-size: 14px; }
footer p { margin: 4px 0; } code { overflow-wrap: anywhere; font-size: 13px; }
@media print { section { break-inside: avoid; } }
"""


# ---- Comparison -> one HTML file that needs nothing else: no script, no network, no other file --


def render(comparison: Comparison) -> str:
    """The report on what ``compare`` returned."""
    corpus = comparison.corpus
    sections = [
        _answer(comparison),
        _figure(
            "How long the documents are",
            "A document longer than the largest capacity must be split; one that is much shorter "
            "must be concatenated or padded. Few documents are long, but they hold many "
            "tokens.",
            charts.length_histogram(comparison),
        ),
        _figure(
            "What each strategy does to them",
            "Less is better in every column, and no strategy is best in all: short samples split "
            "documents, long samples concatenate unrelated ones, whole documents leave gaps. Log "
            "scales; a dot at the left edge is at or below it.",
            charts.trade_off(comparison),
        ),
        _table(comparison),
        _figure(
            "Where the tokens go",
            "Short samples train faster per token when attention spans the sample, and need less "
            "memory; long ones are what teaches long context.",
            charts.tokens_per_bucket(comparison),
        ),
        _figure(
            "Attention",
            "Causal attention over a segment of <i>s</i> tokens costs <i>s</i><sup>2</sup>. Inside "
            "documents that is decided by the documents alone; over whole samples, by the "
            "capacity, and the difference is spent on looking at unrelated text.",
            charts.attention_cost(comparison),
        ),
        _figure(
            f"Equal work on {comparison.num_ranks} ranks",
            f"In a step every rank takes {comparison.tokens_per_rank:,} tokens of one bucket, but "
            "not equally much attention, and all wait for the busiest. Dealing the heaviest "
            "samples first to the least loaded rank costs nothing and changes no gradient. "
            f"Estimated from {NUM_STEPS} drawn steps per bucket, with attention inside documents.",
            charts.rank_imbalance(comparison),
        ),
        _figure(
            "Training time and cost",
            _assumptions(comparison),
            charts.training_time(comparison),
        ),
        _formulas(comparison),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>Packing report: {escape(corpus.name)}</title>\n<style>{STYLE}</style>\n</head>\n"
        "<body>\n<main>\n"
        f"<header><p class='kicker'>megapack packing report</p><h1>{escape(corpus.name)}</h1>"
        f"{_corpus_line(comparison)}</header>\n"
        + "\n".join(sections)
        + f"\n<footer><p>megapack {__version__}, seed {comparison.seed}. Percentages are "
        "exact counts of the packed index; time and cost are estimates.</p></footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def _corpus_line(comparison: Comparison) -> str:
    corpus = comparison.corpus
    sampled = ""
    if corpus.sampled_from is not None:
        sampled = (
            f"<p class='note'>Measured on a random sample of {corpus.num_documents:,} of "
            f"{corpus.sampled_from:,} documents; every figure below is of the sample.</p>"
        )
    return (
        f"<p class='facts'><b>{corpus.num_documents:,}</b> documents "
        f"<b>{short_number(corpus.num_tokens)}</b> tokens "
        f"mean <b>{corpus.mean:,.0f}</b> median <b>{corpus.median:,.0f}</b> "
        f"longest <b>{corpus.longest:,}</b></p>{sampled}"
    )


def _answer(comparison: Comparison) -> str:
    recommendation = comparison.recommendation
    best = comparison.evaluations[recommendation.best]
    decisions = [f"{name}: {words}" for name, words in best.decisions.items()]
    reasons = "".join(
        f"<li>{escape(words)}</li>" for words in (*recommendation.reasons, *decisions)
    )
    capacities = ", ".join(f"{capacity:,}" for capacity in best.case.buckets)
    tiles = (
        ("padding", percent(best.metrics["padding_ratio"]), "of positions"),
        ("truncated", percent(best.metrics["truncation_ratio"]), "of documents"),
        ("concatenated", f"{best.metrics['concatenation_ratio']:.2f}", "documents per sample"),
        (
            "estimate",
            money(best.breakdown.cost),
            f"{duration(best.breakdown.hours)} on "
            f"{comparison.run.num_gpus} x {comparison.run.gpu.name.upper()}",
        ),
    )
    boxes = "".join(
        f"<div class='tile'><span>{name}</span><b>{escape(value)}</b>"
        f"<span>{escape(unit)}</span></div>"
        for name, value, unit in tiles
    )
    fixed = ""
    if recommendation.best_fixed is not None and recommendation.best_fixed != recommendation.best:
        other = comparison.evaluations[recommendation.best_fixed]
        fixed = (
            "<p class='note'>If the trainer accepts only one sample shape: "
            f"<b>{escape(other.label)}</b> ({percent(other.metrics['padding_ratio'])} padding, "
            f"{percent(other.metrics['truncation_ratio'])} truncated, "
            f"{other.metrics['concatenation_ratio']:.2f} documents per sample).</p>"
        )
    return (
        f"<section class='answer'><p class='kicker'>recommended</p><h2>{escape(best.label)} "
        f"<small>samples of {capacities} tokens</small></h2>"
        f"<div class='tiles'>{boxes}</div><ul>{reasons}</ul>{fixed}</section>"
    )


def _figure(title: str, lead: str, drawing: Drawing) -> str:
    return f"<section><h2>{title}</h2><p>{lead}</p><figure>{drawing}</figure></section>"


def _table(comparison: Comparison) -> str:
    heads = (
        ("strategy", ""),
        ("padding", "%"),
        ("truncated", "%"),
        ("concatenated", "docs/sample"),
        ("lost", "%"),
        ("repeated", "%"),
        ("samples", ""),
        ("attention", "tokens"),
        ("imbalance", "busiest / mean"),
        ("GPU hours", ""),
        ("cost", ""),
        ("packed in", "s"),
    )
    head = "".join(f"<th>{name}<small>{unit}</small></th>" for name, unit in heads)
    rows = "".join(
        _table_row(
            evaluation,
            chosen=i == comparison.recommendation.best,
            out=comparison.recommendation.out[i],
        )
        for i, evaluation in enumerate(comparison.evaluations)
    )
    return (
        "<section><h2>All figures</h2><p>Padding in percent of the positions, truncated of the "
        "documents, lost and repeated of the tokens. Attention is the mean squared segment length "
        "per position; imbalance is after longest-first dealing. A name in grey is out of the "
        "recommendation because it loses tokens or splits documents that would fit (hover for "
        "the reason).</p>"
        f"{_left_out(comparison)}<div class='scroll'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _left_out(comparison: Comparison) -> str:
    said = [f"{escape(label)}: {escape(why)}" for label, why in comparison.left_out.items()]
    return f"<p>Left out: {'; '.join(said)}.</p>" if said else ""


def _table_row(evaluation: Evaluation, *, chosen: bool, out: str) -> str:
    metrics, bill = evaluation.metrics, evaluation.breakdown
    cells = (
        f"{100 * metrics['padding_ratio']:.4f}",
        f"{100 * metrics['truncation_ratio']:.3f}",
        f"{metrics['concatenation_ratio']:.3f}",
        f"{100 * metrics['dropped_ratio']:.3f}",
        f"{100 * metrics['repeated_ratio']:.3f}",
        f"{metrics['num_samples']:,}",
        f"{evaluation.mean_context:,.0f}",
        f"{evaluation.imbalance('balanced'):.3f}",
        f"{bill.gpu_hours:,.1f}",
        money(bill.cost),
        f"{evaluation.seconds:.3f}",
    )
    css = "chosen" if chosen else "out" if out else ""
    body = "".join(f"<td>{cell}</td>" for cell in cells)
    return (
        f"<tr class='{css}'><th title='{escape(out, quote=True)}'>{escape(evaluation.label)}</th>"
        f"{body}</tr>"
    )


def _assumptions(comparison: Comparison) -> str:
    run = comparison.run
    best = comparison.evaluations[comparison.recommendation.best]
    amount = (
        f"as many document tokens as the data has ({short_number(comparison.corpus.num_tokens)})"
        if run.train_tokens is None
        else f"{short_number(run.train_tokens)} document tokens "
        f"({best.breakdown.num_passes:.3g} passes over these lengths)"
    )
    scope = "inside documents" if run.attention == "document" else "over whole samples"
    if run.dealing == "random":
        scope += ", samples dealt to the ranks at random"
    return (
        f"A model of {short_number(run.model.parameters)} parameters, {run.model.num_layers} "
        f"layers, attention width {run.model.attention_width:,}; {amount}; attention {scope}; "
        f"{run.num_gpus} x {run.gpu.name.upper()} at {run.utilization:.0%} of "
        f"{run.gpu.peak_flops / 1e12:,.0f} TFLOP/s and ${run.price_per_gpu_hour:.2f} per GPU hour. "
        "The bars say what the hours are spent on; a bar marked // is cut."
    )


def _formulas(comparison: Comparison) -> str:
    run = comparison.run
    model = run.model
    best = comparison.evaluations[comparison.recommendation.best]
    bill = best.breakdown
    positions = best.num_positions * bill.num_passes
    squares = (
        sum(b.sample_squares if run.attention == "sample" else b.work for b in best.work)
        * bill.num_passes
    )
    lines = (
        ("padding ratio", "padding tokens / (samples &times; capacity), summed over buckets"),
        ("truncation ratio", "documents split or shortened / documents"),
        ("concatenation ratio", "documents / samples"),
        (
            "operations",
            "6 <i>N</i> &times; positions + 7 <i>layers</i> &times; <i>width</i> &times; "
            "&Sigma; <i>s</i><sup>2</sup> "
            "<small><i>s</i>: segment lengths, each sample's padding as a segment (attention "
            "inside documents), or sample capacities (attention over whole samples). 6: two "
            "operations forward and four backward per parameter. 7: attention's 2 + 5 matrix "
            "products, halved by causality.</small>",
        ),
        (
            "waiting",
            "attention work of a bucket &times; (busiest rank / mean rank &minus; 1) "
            "<small>the other work is equal by construction</small>",
        ),
        (
            "GPU hours",
            "(operations + waiting) / (3600 &times; peak &times; utilization)",
        ),
        ("wall time", "GPU hours / GPUs"),
        ("cost", "GPU hours &times; price"),
    )
    body = "".join(f"<dt>{name}</dt><dd>{formula}</dd>" for name, formula in lines)
    example = (
        f"<p>For <b>{escape(best.label)}</b>: 6 &times; {short_number(model.parameters)} &times; "
        f"{short_number(positions)} + 7 &times; {model.num_layers} &times; "
        f"{model.attention_width:,} &times; {squares:.3g} = "
        f"{model.flops_per_token * positions + model.flops_per_square * squares:.4g} operations; "
        f"with {bill.waiting / bill.gpu_hours:.2%} of waiting, "
        f"{short_number(bill.gpu_hours, 4)} GPU hours = {duration(bill.hours)} on {run.num_gpus} "
        f"GPUs = {money(bill.cost)}.</p>"
    )
    return (
        f"<section><h2>The formulas</h2><dl>{body}</dl>{example}"
        "<p>The recommendation leaves out what loses more than "
        f"{percent(MAX_DROPPED)} of the tokens or splits more than {percent(MAX_EXTRA_TRUNCATION)} "
        "of the documents beyond those longer than the largest capacity compared. Of the rest it "
        f"takes the least time; within {percent(SAME_TIME)} of it, fewer documents per sample, "
        "then fewer split documents, then less padding.</p>"
        "<p>Not in the estimate: communication, input, optimizer and evaluation (they are inside "
        "the utilization you give), restarts, and kernels that are slower on short segments.</p>"
        "</section>"
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
                prefix, comparison.seed
            ),
            "fixed_length": None if fixed is None else labels[fixed],
            "reasons": list(recommendation.reasons),
        },
    }


def _evaluation(evaluation: Evaluation) -> dict[str, Any]:
    bill = evaluation.breakdown
    return {
        "label": evaluation.label,
        "strategy": evaluation.case.strategy,
        "buckets": list(evaluation.case.buckets),
        "parameters": dict(evaluation.case.parameters),
        "decisions": evaluation.decisions,
        "seconds": evaluation.seconds,
        "metrics": evaluation.metrics,
        "work": [dataclasses.asdict(bucket) for bucket in evaluation.work],
        "cost": {
            **dataclasses.asdict(bill),
            "gpu_hours": bill.gpu_hours,
            "hours": bill.hours,
            "cost": bill.cost,
        },
    }
