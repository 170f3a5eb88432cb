"""A run on one page: one HTML file that needs nothing else, also while the run goes on.

Losses of sources and buckets, validation, mixture, what the run decided itself, branches, speed,
waiting, stragglers, memory, and above all of it what must be looked at before the run is trusted.
It is made of the run's directory (config.yaml, starts.jsonl, log.jsonl, evaluation.jsonl,
decisions.json, checkpoints/); what is not there is left out. Needs matplotlib, and no torch.

examples:
  megapack-build report runs/a                     # runs/a/report.html
  watch -n 60 megapack-build report runs/a         # anew every minute, while it trains
  megapack-build report runs/a --output a.html
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megapack import __version__
from megapack.cli import report_charts
from megapack.cli.arguments import add_shared
from megapack.cli.report_charts import Draw, RunFacts, read_run, slowest
from megapack.compare.charts import draw
from megapack.compare.page import document, template, tiles_of
from megapack.errors import printable
from megapack.storage.files import atomic_write
from megapack.training.monitoring.slowdowns import slowdowns
from megapack.units import count, counted, percent, short

ROWS = 40  # of a table; the files have all
SILENT = 300.0  # seconds, or ten log lines, after which a run that says nothing is doubted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="directory of a run")
    add_shared(parser, "--output", help="RUN_DIR/report.html unless given")


def run(args: argparse.Namespace) -> int:
    page = run_page(read_run(args.run))
    target = Path(args.output or Path(args.run) / "report.html")
    with atomic_write(target, "w") as file:
        file.write(printable(page))
    print(f"report: {target}")
    return 0


def run_page(facts: RunFacts) -> str:
    """The page. Raises ConfigError: matplotlib is not installed."""
    found = list(checks(facts))
    reason = facts.end.get("reason", "unknown")
    worst = max((check.level for check in found), default=0)
    mood = "bad" if worst == 2 else "good" if reason == "done" and worst == 0 else ""
    done, of = _done(facts), facts.num_steps
    share = min(1.0, done / of) if of else 0.0
    name = escape(facts.run.path.resolve().name)
    body = template("run.html").substitute(
        name=name,
        facts=_facts(facts),
        mood=mood,
        state=STATES.get(reason, "how it ended is not recorded"),
        progress=f"step {count(done)}{f' of {count(of)}' if of else ''}",
        bar=f"<div class='bar'><i style='width:{100 * share:.1f}%'></i></div>" if of else "",
        tiles=tiles_of(tiles(facts)),
        checks="".join(
            f"<li class='{('ok', 'look', 'bad')[check.level]}'><b>{escape(check.what)}</b>: "
            f"{escape(check.sentence)}</li>"
            for check in sorted(found, key=lambda check: -check.level)
        ),
        sections="".join(sections(facts)),
        version=__version__,
        now=_date(time.time()),
        path=escape(str(facts.run.path)),
    )
    return document(f"Run: {name}", body, "page.css", "run.css")


STATES = {
    "running": "running",
    "done": "done",
    "signal": "stopped by a signal, saved",
    "stop_at": "stopped at stop_at, saved",
    "error": "ended with an error",
}


def _done(facts: RunFacts) -> int:
    return int(facts.log.column("step")[-1]) + 1


def _facts(facts: RunFacts) -> str:
    """One line under the name: what is trained, where, since when."""
    said = [(short(facts.log.column("tokens_seen")[-1]), "tokens seen")]
    if facts.starts:
        last = facts.starts[-1]
        said.insert(0, (short(last["parameters"]), "parameters"))
        said += [(counted(last["world_size"], "rank"), f"on {last['device']}")]
        said += [(_date(facts.starts[0]["time"]), "UTC started")]
    return " ".join(f"<b>{escape(value)}</b> {escape(words)}" for value, words in said)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


# ---- At one look


def tiles(facts: RunFacts) -> Iterator[tuple[str, str, str]]:
    """Name, figure and unit; means are over the last tenth of the steps."""
    log = facts.log
    loss = f"{log.recent('loss'):.4f}".replace("nan", "no number")
    yield "training loss", loss, "mean of the last tenth"
    if facts.evaluations:
        last = facts.evaluations[-1]
        yield "validation perplexity", f"{last['perplexity']:.4g}", f"after step {last['step'] - 1}"
    ranks = facts.starts[-1]["world_size"] if facts.starts else None
    of = f"per second, {counted(ranks, 'rank')}" if ranks else "per second"
    yield "useful tokens", short(log.recent("useful_tokens_per_second")), of
    if math.isnan(log.recent("mfu")):
        yield "padding", percent(log.recent("padding"), None), "of the positions"
    else:
        yield "MFU", percent(log.recent("mfu"), 1), "attention inside documents"
    yield "waited for data", percent(log.recent("data_wait_share"), 1), "of the time, first rank"
    ratios = [f["most"] / f["median"] for _, f, _ in log.ranks if f["median"]]
    if ratios:
        ratios = ratios[-max(1, len(ratios) // 10) :]
        yield "slowest rank", f"{sum(ratios) / len(ratios):.2f}", "times the median forward"
    yield "memory", f"{np.nanmax(log.column('memory_gib')):.3g} GiB", "most ever, first rank"
    spent = float(log.column("seconds").sum())
    if facts.num_steps and facts.end.get("reason") == "running":
        left = (facts.num_steps - _done(facts)) * log.recent("seconds")
        yield "left", _duration(left), f"after {_duration(spent)} of training"
    else:
        yield "trained for", _duration(spent), "without what was taken back"


class Check(NamedTuple):
    """One thing to know before the run is trusted."""

    level: int
    """0 as it should be, 1 look at it, 2 it is wrong."""
    what: str
    sentence: str


def checks(facts: RunFacts) -> Iterator[Check]:
    """All there are."""
    if facts.end.get("reason") == "error":
        yield Check(2, "ended", str(facts.end.get("message", "no reason was written")))
    yield from _alive(facts)
    log = facts.log
    bad, said = log.lost, "all finite"
    if bad:
        said = f"no number at {counted(len(bad), 'step')}, first {bad[0]:,}"
    if log.skipped:
        said += f"; {counted(len(log.skipped), 'update')} skipped for gradients that are not finite"
    unscored = [
        line["step"] - 1
        for line in facts.evaluations
        if not all(map(math.isfinite, (line["loss"], *line.get("source_loss", {}).values())))
    ]
    if unscored:
        said += f"; held-out documents have no number after step {unscored[0]:,}"
    yield Check(2 if bad or unscored else int(bool(log.skipped)), "losses", said)
    yield _autopilot(facts)
    yield from _data_order(facts)
    yield _saved(facts)
    if log.latest and any(line["step"] > 0 for line in log.latest):
        found = slowdowns([line for line in log.latest if line["step"] > 0])
        for one in found:
            if one.passes:
                yield Check(1, one.what, one.sentence)
        if not any(one.passes for one in found):
            said = ", ".join(f"{one.what} {one.value:.2f} of {one.limit:g}" for one in found)
            yield Check(0, "speed", f"within its limits in the last log line ({said})")


def _alive(facts: RunFacts) -> Iterator[Check]:
    if facts.end.get("reason") != "running":
        return
    age = max(0.0, time.time() - facts.run.log.stat().st_mtime)
    every = facts.config.get("logging", {}).get("every", 10)
    limit = max(SILENT, 10 * every * facts.log.recent("seconds"))
    said = f"last line of the log {_duration(age)} ago"
    if age > limit:
        said += f"; a run that was killed says running, too (process {facts.end.get('pid')} on "
        yield Check(1, "running?", f"{said}{facts.end.get('host')})")
    else:
        yield Check(0, "running", said)


def _autopilot(facts: RunFacts) -> Check:
    section = facts.config.get("autopilot", {})
    made = [d for d in facts.decisions.decisions if d.by == "autopilot"] if facts.decisions else []
    if not section.get("spikes"):
        return Check(0, "autopilot", "off: only a loss that is no number ends the run")
    if not made:
        return Check(0, "autopilot", "on, and nothing left its band")
    passed = sum(d.stage.skip_steps for d in made if not d.void)
    allowed = section.get("max_rollbacks", 0)
    return Check(
        1,
        "autopilot",
        f"went back {len(made)} of {allowed} times and skipped {counted(passed, 'step')}; look at "
        "them with megapack-build trace RUN_DIR/config.yaml --skipped",
    )


def _data_order(facts: RunFacts) -> Iterator[Check]:
    starts = facts.starts
    if not starts:
        return
    changes = [change for start in starts for change in start.get("data_order_changes", [])]
    same = all(start.get("fingerprints") == starts[0].get("fingerprints") for start in starts)
    said = f"{counted(len(starts), 'start')}, documents and samples with the same fingerprints"
    yield Check(
        int(bool(changes) or not same),
        "data order",
        "; ".join(changes) if changes else said if same else "fingerprints of the data changed",
    )
    commits = [start.get("git") or {} for start in starts]
    dirty = any(commit.get("dirty") for commit in commits)
    ids = list(dict.fromkeys(str(commit.get("commit"))[:12] for commit in commits if commit))
    if ids:
        said = f"commit {', then '.join(ids)}"
        more = ", with changes that are in no commit" if dirty else ""
        yield Check(int(dirty or len(ids) > 1), "code", said + more)


def _saved(facts: RunFacts) -> Check:
    section, steps = facts.config.get("checkpoint", {}), facts.checkpoints
    mirror = section.get("mirror")
    far = f"; mirrored at {mirror}" if mirror else ""
    if not steps:
        return Check(1, "checkpoints", f"none yet{far}")
    behind = _done(facts) - steps[-1]
    kept = f"; kept: {', '.join(map(count, steps[-12:]))}" if len(steps) > 1 else ""
    ahead = f", {counted(behind, 'step')} ago" if behind > 0 else ""
    return Check(0, "checkpoints", f"newest after {count(steps[-1])} steps{ahead}{kept}{far}")


# ---- Sections


def sections(facts: RunFacts) -> Iterator[str]:
    """HTML of all that the run has something for."""
    log = facts.log
    of_losses: list[tuple[str, Draw]] = []
    if log.sources:
        of_losses.append(("By source", report_charts.loss_by_source))
    if len(report_charts.buckets(facts)) > 1:
        one = facts.config.get("data", {}).get("mix") != "micro_step"
        title = "By bucket" if one else "By the first bucket of the step, which has several"
        of_losses.append((title, report_charts.loss_by_bucket))
    if len(facts.evaluations) > 1:
        of_losses.append(("Validation", report_charts.validation))
    if log.sources:
        of_losses.append(("What was drawn", report_charts.mixture))
    yield _section(
        "Loss",
        "Per label token of a step, over all ranks. Triangles say where the run was changed, by "
        "itself or by hand; the figures show under the mouse.",
        f"<figure>{draw(report_charts.loss, facts)}</figure>",
        _pair(facts, of_losses),
    )
    yield from _program(facts)
    yield from _branches(facts)
    speed: list[tuple[str, Draw]] = [
        ("Throughput", report_charts.throughput),
        ("Waiting and padding", report_charts.waste),
        ("Stragglers and equal work", report_charts.stragglers),
        ("Memory", report_charts.memory),
    ]
    if not math.isnan(log.recent("mfu", 1.0)):
        speed.insert(1, ("Model FLOPs utilization", report_charts.utilization))
    yield _section("Speed", "", _pair(facts, speed), _ranks(facts))
    optimizer: list[tuple[str, Draw]] = [
        ("Learning rate", report_charts.learning_rate),
        ("Gradient norm, before clipping", report_charts.gradients),
    ]
    yield _section("Optimizer", "", _pair(facts, optimizer))
    yield from _starts(facts)
    if facts.run.config.exists():
        text = escape(facts.run.config.read_text(encoding="utf-8")[:60_000])
        yield _section(
            "Configuration", "", f"<details><summary>all of it</summary><pre>{text}</pre></details>"
        )


def _section(title: str, words: str, *parts: str) -> str:
    about = f"<p>{words}</p>" if words else ""
    return f"<section><h2>{title}</h2>{about}{''.join(parts)}</section>\n"


def _pair(facts: RunFacts, plots: Sequence[tuple[str, Draw]]) -> str:
    """Small charts side by side, or one below the other where there is no room."""
    shown = (
        f"<figure><figcaption>{title}</figcaption>{draw(plot, facts)}</figure>"
        for title, plot in plots
    )
    return f"<div class='pair'>{''.join(shown)}</div>" if plots else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0) -> str:
    """Rows of text; the last ``left`` columns are prose. A row that begins with ~ is void."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = []
    for first, *cells in rows:
        css = " class='void'" if first.startswith("~") else ""
        places = ["" if i < len(cells) - left else " class='words'" for i in range(len(cells))]
        tail = "".join(f"<td{c}>{escape(x)}</td>" for c, x in zip(places, cells, strict=True))
        body.append(f"<tr{css}><th>{escape(first.lstrip('~'))}</th>{tail}</tr>")
    return (
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _program(facts: RunFacts) -> Iterator[str]:
    """Stages that were written by hand, and what the run decided itself."""
    order = facts.starts[-1].get("data_order", {}) if facts.starts else {}
    names = facts.starts[-1].get("sources", []) if facts.starts else []
    made = facts.decisions.decisions if facts.decisions else ()
    decided = {d.begin for d in made if not d.void}
    rows: list[tuple[int, list[str]]] = []
    before: Mapping[str, Any] = order
    for stage in order.get("stages", ()):
        if stage["from_step"] not in decided:
            rows.append((stage["from_step"], ["written", _changes(before, stage, names), ""]))
        before = stage
    for decision in made:
        weights = decision.stage.weights
        said = (
            f"skips {counted(decision.stage.skip_steps, 'step')}"
            if weights is None
            else (_weights(list(weights), list(weights.values())))
        )
        by = f"{decision.by}{' (taken back)' if decision.void else ''}"
        why = f"losses: {decision.reason}" if decision.by == "mixing" else decision.reason
        rows.append((decision.begin, [by, said, why]))
    if not rows:
        return
    rows.sort(key=lambda row: row[0])
    begin = escape(_weights(names, order.get("weights") or []))
    more = f" Of {len(rows):,} the last {ROWS}." if len(rows) > ROWS else ""
    shown = [[f"{'~' * by.endswith(')')}{count(s)}", by, *rest] for s, (by, *rest) in rows[-ROWS:]]
    yield _section(
        "Stages and decisions",
        f"{begin} from step 0 on; then what the manifest says, and what the run decided itself by "
        f"its rules (decisions.json), in the order in which they take effect.{more}",
        _table(("from step", "by", "what", "why"), shown, left=2),
    )


def _weights(names: Sequence[str], values: Sequence[Any]) -> str:
    total = math.fsum(value for value in values if value is not None) or 1.0
    named = [*names, *(f"source {i}" for i in range(len(names), len(values)))]
    shown = [
        f"{name} {'by size' if value is None else percent(value / total, 1)}"
        for name, value in zip(named, values, strict=False)
    ]
    more = f", {len(shown) - 12} more" if len(shown) > 12 else ""
    return ", ".join(shown[:12]) + more if shown else "All documents"


_USUAL = {"loss_weights": 1.0, "fim_rates": 0.0}  # of sources for which a stage says nothing


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], names: Sequence[str]) -> str:
    """What a stage does otherwise than the one before it."""
    said: list[str] = []
    was: Any
    for key in dict.fromkeys((*after, *_USUAL, "attention_window")):
        value, was = after.get(key), 0 if key == "skip_steps" else before.get(key)
        if key in _USUAL:  # of sources that are drawn
            pairs = zip_longest(value or (), was or (), fillvalue=_USUAL[key])
            rows = zip(names, pairs, after["weights"], strict=False)
            found = [f"{name} {now:g}" for name, (now, then), w in rows if w != 0 and now != then]
            said += [f"{key} {', '.join(found)}"] if found else []
        elif key not in ("from_step", "skipped") and value != was:
            shown = f"{key} {value or 'none'}"
            said.append(_weights(names, value or ()) if key == "weights" else shown)
    return ", ".join(said) or "nothing that is drawn otherwise"


def _branches(facts: RunFacts) -> Iterator[str]:
    origin = facts.config.get("checkpoint", {}).get("branch_from")
    words = f"This run began at {escape(str(origin))}." if origin else ""
    if not facts.branches:
        if origin:
            yield _section("Branches", words)
        return
    rows = [
        [b.path.name, count(b.from_step)]
        + ([count(int(b.log.column("step")[-1]) + 1)] if b.log else ["-"])
        + ([f"{b.log.recent('loss'):.4f}"] if b.log else ["-"])
        + [STATES.get(b.reason, b.reason)]
        for b in facts.branches[:ROWS]
    ]
    chart = ""
    if any(b.log for b in facts.branches):
        chart = f"<figure>{draw(report_charts.branches, facts)}</figure>"
    yield _section(
        "Branches",
        f"{words} Runs that began at a checkpoint of this one, with its data order continued.",
        chart,
        _table(("run", "from step", "steps done", "loss, last tenth", "state"), rows),
    )


def _ranks(facts: RunFacts) -> str:
    """Which ranks were the slowest, and which waited longest, over all log lines."""
    number = len(facts.log.ranks)
    if number == 0 or not facts.starts or max(s["world_size"] for s in facts.starts) < 2:
        return ""
    rows = [
        [f"rank {rank} on {host}", what, f"{times:,} of {number:,}"]
        for which, what in ((0, "slowest forward"), (1, "longest wait for batches"))
        for (rank, host), times in slowest(facts.log, which).most_common(5)
    ]
    return _table(("rank", "was the one with the", "log lines"), rows)


def _starts(facts: RunFacts) -> Iterator[str]:
    if not facts.starts:
        return
    rows = [
        [
            _date(start["time"]),
            count(start["step"]),
            count(start["world_size"]),
            start["host"],
            start["device"],
            str((start.get("git") or {}).get("commit"))[:12],
            start.get("versions", {}).get("torch", ""),
        ]
        for start in facts.starts[-ROWS:]
    ]
    words = counted(len(facts.starts), "start") + ", each with all versions in starts.jsonl."
    heads = ("started (UTC)", "at step", "ranks", "first rank on", "device", "commit", "torch")
    yield _section("Starts", words, _table(heads, rows))
