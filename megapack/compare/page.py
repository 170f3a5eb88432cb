"""A comparison as one HTML page, and as JSON values.

* ``render(comparison)``: a page that needs nothing else, no script, no network, no other file;
* ``to_json(comparison)``: dicts and lists, what ``--json`` prints;
* ``document``, ``tiles_of``: the parts that the page of a run has, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from html import escape
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

# Light and dark follow the reader's system; system fonts only.
STYLE = """* { box-sizing: border-box; }
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
.answer { background: var(--card); border-left: 4px solid var(--blue); border-radius: 6px;
  padding: 20px 26px 18px; }
.answer h2 { font-size: 27px; color: var(--blue); margin: 0 0 14px; }
.answer h2 small { font-size: 15px; font-weight: 400; color: var(--soft); margin-left: 8px; }
.answer ul { margin: 16px 0 0; padding-left: 20px; }
.answer li { margin: 3px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px; }
.tile { background: var(--paper); border: 1px solid var(--rule); border-radius: 6px;
  padding: 10px 14px; display: flex; flex-direction: column; }
.tile span { color: var(--soft); font-size: 13px; }
.tile b { font-size: 24px; line-height: 1.3; font-variant-numeric: tabular-nums; }
figure { margin: 0; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 720px; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 12.5px;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 6px; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
tbody th { font-weight: 500; white-space: normal; min-width: 150px; }
th:first-child { text-align: left; }
thead th { vertical-align: bottom; font-weight: 600; border-bottom: 1.5px solid var(--soft); }
thead small { display: block; color: var(--soft); font-weight: 400; font-size: 11px; }
tr.chosen { background: var(--card); } tr.chosen th { color: var(--blue); font-weight: 700; }
tr.out th { color: var(--soft); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 8px 22px; margin: 0 0 16px; }
dt { font-weight: 600; } dd { margin: 0; }
dd small { display: block; color: var(--soft); max-width: 80ch; }
footer { border-top: 1px solid var(--rule); padding-top: 14px; color: var(--soft);
  font-size: 14px; }
footer p { margin: 4px 0; } code { overflow-wrap: anywhere; font-size: 13px; }
@media print { section { break-inside: avoid; } }"""


def document(title: str, body: str, css: str = "") -> str:
    """An HTML page that needs nothing else; ``css`` is added to the stylesheet."""
    light, dark = (
        " ".join(f"--{name}: {colours[theme]};" for name, colours in charts.PALETTE.items())
        for theme in (0, 1)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}
{STYLE}{css}
</style>
</head>
<body>
<main>
{body}</main>
</body>
</html>
"""


def tiles_of(tiles: Iterable[tuple[str, str, str]]) -> str:
    """Name, figure and unit of each."""
    return "".join(
        f"<div class='tile'><span>{name}</span><b>{escape(value)}</b>"
        f"<span>{escape(unit)}</span></div>"
        for name, value, unit in tiles
    )


BODY = Template("""<header><p class='kicker'>megapack packing report</p><h1>$name</h1>
<p class='facts'>$facts</p>$sampled</header>
<section class='answer'><p class='kicker'>recommended</p>
<h2>$best <small>samples of $capacities tokens</small></h2>
<div class='tiles'>$tiles</div><ul>$reasons</ul>$fixed</section>
<section><h2>How long the documents are</h2>
<p>A document longer than the largest capacity must be split; one that is much shorter must be
concatenated or padded. Few documents are long, but they hold many tokens.</p>
<figure>$length_histogram</figure></section>
<section><h2>What each strategy does to them</h2>
<p>Less is better in every column, and no strategy is best in all: short samples split documents,
long samples concatenate unrelated ones, whole documents leave gaps. Log scales; a dot at the left
edge is at or below it.</p>
<figure>$trade_off</figure></section>
<section><h2>All figures</h2>
<p>Padding in percent of the positions, truncated of the documents, lost and repeated of the tokens.
Attention is the mean squared segment length per position; imbalance is after longest-first dealing.
A name in grey is out of the recommendation because it loses tokens or splits documents that would
fit (hover for the reason).</p>
$left_out<div class='scroll'><table><thead><tr>$heads</tr></thead>
<tbody>$rows</tbody></table></div></section>
<section><h2>Where the tokens go</h2>
<p>Short samples train faster per token when attention spans the sample, and need less memory; long
ones are what teaches long context.</p>
<figure>$tokens_per_bucket</figure></section>
<section><h2>Attention</h2>
<p>Causal attention over a segment of <i>s</i> tokens costs <i>s</i><sup>2</sup>. Inside documents
that is decided by the documents alone; over whole samples, by the capacity, and the difference is
spent on looking at unrelated text.</p>
<figure>$attention_cost</figure></section>
<section><h2>Equal work on $num_ranks ranks</h2>
<p>In a step every rank takes $tokens_per_rank tokens of one bucket, but not equally much attention,
and all wait for the busiest. Dealing the heaviest samples first to the least loaded rank costs
nothing and changes no gradient. Estimated from $num_steps drawn steps per bucket, with attention
inside documents.</p>
<figure>$rank_imbalance</figure></section>
<section><h2>Training time and cost</h2><p>$assumptions</p>
<figure>$training_time</figure></section>
<section><h2>The formulas</h2><dl>
<dt>padding ratio</dt><dd>padding tokens / (samples &times; capacity), summed over buckets</dd>
<dt>truncation ratio</dt><dd>documents split or shortened / documents</dd>
<dt>concatenation ratio</dt><dd>documents / samples</dd>
<dt>operations</dt><dd>6 <i>N</i> &times; positions + 7 <i>layers</i> &times; <i>width</i> &times;
&Sigma; <i>s</i><sup>2</sup> <small><i>s</i>: segment lengths, each sample's padding as a segment
(attention inside documents), or sample capacities (attention over whole samples). 6: two operations
forward and four backward per parameter. 7: attention's 2 + 5 matrix products, halved by
causality.</small></dd>
<dt>waiting</dt><dd>attention work of a bucket &times; (busiest rank / mean rank &minus; 1)
<small>the other work is equal by construction</small></dd>
<dt>GPU hours</dt><dd>(operations + waiting) / (3600 &times; peak &times; utilization)</dd>
<dt>wall time</dt><dd>GPU hours / GPUs</dd>
<dt>cost</dt><dd>GPU hours &times; price</dd></dl>
<p>$example</p>
<p>The recommendation leaves out what loses more than $max_dropped of the tokens or splits more than
$max_extra of the documents beyond those longer than the largest capacity compared. Of the rest it
takes the least time; within $same_time of it, ${fewer_joined}fewer split documents, then less
padding.</p>
<p>Not in the estimate: communication, input, optimizer and evaluation (they are inside the
utilization you give), restarts, and kernels that are slower on short segments.</p></section>
<footer><p>megapack $version, seed $seed. Percentages are exact counts of the packed index; time and
cost are estimates.</p></footer>
""")
PLOTS = (
    charts.length_histogram,
    charts.trade_off,
    charts.tokens_per_bucket,
    charts.attention_cost,
    charts.rank_imbalance,
    charts.training_time,
)


def render(comparison: Comparison) -> str:
    """The page. Raises ConfigError: matplotlib is not installed."""
    corpus, recommendation = comparison.corpus, comparison.recommendation
    best = comparison.evaluations[recommendation.best]
    left_out = [f"{escape(label)}: {escape(why)}" for label, why in comparison.left_out.items()]
    reasons = [*recommendation.reasons, *(f"{n}: {words}" for n, words in best.decisions.items())]
    name = escape(corpus.name)
    body = BODY.substitute(
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
    return document(f"Packing report: {name}", body)


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
