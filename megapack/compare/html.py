"""Comparison -> one HTML file that needs nothing else: no script, no network, no other file."""

from __future__ import annotations

from html import escape

from megapack import __version__
from megapack.compare import charts
from megapack.compare.comparison import Comparison
from megapack.compare.evaluation import Evaluation
from megapack.compare.recommend import MAX_DROPPED, MAX_EXTRA_TRUNCATION, SAME_TIME
from megapack.compare.style import STYLE
from megapack.compare.svg import Drawing
from megapack.compare.words import duration, money, percent, short_number
from megapack.compare.workload import NUM_STEPS

__all__ = ["render"]


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
