"""Write one self-contained HTML page about a run, finished or still running.

The page begins with checks of the run, then shows losses by source and bucket, validation, mixture,
decisions of the run itself, branches, speed, waiting, stragglers and memory. It reads the run
directory (config.yaml, starts.jsonl, log.jsonl, evaluation.jsonl, decisions.json, checkpoints/) and
leaves out what is missing. It needs matplotlib, but not torch.

examples:
  megapack-build report runs/a                     # runs/a/report.html
  watch -n 60 megapack-build report runs/a         # renew the page every minute
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
from megapack.cli.output import print_result
from megapack.cli.report_charts import Draw, RunFacts, read_run, slowest
from megapack.compare.charts import draw
from megapack.compare.page import document, template, tiles_of
from megapack.errors import printable
from megapack.storage.files import atomic_write
from megapack.training.monitoring.slowdowns import slowdowns
from megapack.units import count, counted, percent, short

ROWS = 40  # of a table; the files have all
SILENT = 300.0  # seconds without a log line (or ten log intervals) before a warning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="directory of the run")
    add_shared(parser, "--output", help="an HTML page (default: RUN_DIR/report.html)")
    add_shared(parser, "--json")


def run(args: argparse.Namespace) -> None:
    facts = read_run(args.run)
    page = run_page(facts)
    target = Path(args.output or Path(args.run) / "report.html")
    with atomic_write(target, "w") as file:
        file.write(printable(page))
    listed = [check._asdict() for check in checks(facts)]
    print_result(args, {"report": str(target), "checks": listed}, f"report: {target}")


def run_page(facts: RunFacts) -> str:
    """Return the page. Raises ConfigError if matplotlib is not installed."""
    listed = sorted(checks(facts), key=lambda check: -check.level)
    reason = facts.end.get("reason", "unknown")
    worst = max((check.level for check in listed), default=0)
    mood = "bad" if worst == 2 else "good" if reason == "done" and worst == 0 else ""
    done, total = _num_done(facts), facts.num_steps
    share = min(1.0, done / total) if total else 0.0
    name = escape(facts.run.path.resolve().name)
    body = template("run.html").substitute(
        name=name,
        facts=_facts(facts),
        mood=mood,
        state=STATES.get(reason, "how it ended is not recorded"),
        progress=f"step {count(done)}{f' of {count(total)}' if total else ''}",
        bar=f"<div class='bar'><i style='width:{100 * share:.1f}%'></i></div>" if total else "",
        tiles=tiles_of(tiles(facts)),
        checks="".join(
            f"<li class='{('ok', 'look', 'bad')[check.level]}'><b>{escape(check.what)}</b>: "
            f"{escape(check.sentence)}</li>"
            for check in listed
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


def _num_done(facts: RunFacts) -> int:
    return int(facts.log.column("step")[-1]) + 1


def _facts(facts: RunFacts) -> str:
    items = [("", short(facts.log.column("tokens_seen")[-1]), "tokens seen")]
    if facts.starts:
        last = facts.starts[-1]
        items.insert(0, ("", short(last["parameters"]), "parameters"))
        items += [("", counted(last["world_size"], "rank"), f"on {last['device']}")]
        items += [("started ", _date(facts.starts[0]["time"]), "UTC")]
    return ", ".join(f"{word}<b>{escape(value)}</b> {escape(text)}" for word, value, text in items)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


# ---- Tiles and checks at the top -----------------------------------------------------------------


def tiles(facts: RunFacts) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, unit); means are over the last tenth of the steps."""
    log = facts.log
    loss = f"{log.recent('loss'):.4f}".replace("nan", "NaN")
    yield "training loss", loss, "mean of the last tenth"
    if facts.evaluations:
        last = facts.evaluations[-1]
        yield "validation perplexity", f"{last['perplexity']:.4g}", f"after step {last['step']}"
    ranks = facts.starts[-1]["world_size"] if facts.starts else None
    unit = f"per second, {counted(ranks, 'rank')}" if ranks else "per second"
    yield "useful tokens", short(log.recent("useful_tokens_per_second")), unit
    if math.isnan(log.recent("mfu")):
        yield "padding", percent(log.recent("padding"), None), "of the positions"
    else:
        yield "MFU", percent(log.recent("mfu"), 1), "attention inside documents"
    if not math.isnan(second := log.recent("second_padding")):
        yield "second padding", percent(second, None), "of the second capacities"
    yield "waited for data", percent(log.recent("data_wait_share"), 1), "of the time, first rank"
    ratios = [f["most"] / f["median"] for _, f, _ in log.ranks if f["median"]]
    if ratios:
        ratios = ratios[-max(1, len(ratios) // 10) :]
        yield "slowest rank", f"{sum(ratios) / len(ratios):.2f}", "times the median forward"
    yield "memory", f"{np.nanmax(log.column('memory_gib')):.3g} GiB", "peak, first rank"
    spent = float(log.column("seconds").sum())
    if facts.num_steps and facts.end.get("reason") == "running":
        remaining = (facts.num_steps - _num_done(facts)) * log.recent("seconds")
        yield "left", _duration(remaining), f"after {_duration(spent)} of training"
    else:
        yield "trained for", _duration(spent), "without repeated steps"


class Check(NamedTuple):
    level: int  # 0: good; 1: needs a look; 2: wrong
    what: str
    sentence: str


def checks(facts: RunFacts) -> Iterator[Check]:
    if facts.end.get("reason") == "error":
        yield Check(2, "ended", str(facts.end.get("message", "no reason was recorded")))
    yield from _alive(facts)
    log = facts.log
    text = "all finite"
    if log.not_finite:
        num_steps = counted(len(log.not_finite), "step")
        text = f"NaN or infinite at {num_steps}, first {log.not_finite[0]:,}"
    if log.skipped:
        text += f"; {counted(len(log.skipped), 'update')} skipped for gradients that are not finite"
    unscored = [
        line["step"]
        for line in facts.evaluations
        if not all(map(math.isfinite, (line["loss"], *line.get("source_loss", {}).values())))
    ]
    if unscored:
        text += f"; the validation loss is NaN or infinite after step {unscored[0]:,}"
    yield Check(2 if log.not_finite or unscored else int(bool(log.skipped)), "losses", text)
    yield _autopilot(facts)
    yield from _data_order(facts)
    yield _saved(facts)
    if log.latest and any(line["step"] > 0 for line in log.latest):
        measured = slowdowns([line for line in log.latest if line["step"] > 0])
        for slowdown in measured:
            if slowdown.passes:
                yield Check(1, slowdown.what, slowdown.sentence)
        if not any(slowdown.passes for slowdown in measured):
            values = ", ".join(f"{s.what} {s.value:.2f} of {s.limit:g}" for s in measured)
            yield Check(0, "speed", f"within its limits in the last log line ({values})")


def _alive(facts: RunFacts) -> Iterator[Check]:
    if facts.end.get("reason") != "running":
        return
    age = max(0.0, time.time() - facts.run.log.stat().st_mtime)
    every = facts.config.get("logging", {}).get("every", 10)
    limit = max(SILENT, 10 * every * facts.log.recent("seconds"))
    text = f"last line of the log {_duration(age)} ago"
    if age > limit:
        process = f"process {facts.end.get('pid')} on {facts.end.get('host')}"
        yield Check(1, "running?", f"{text}; the run may have been killed ({process})")
    else:
        yield Check(0, "running", text)


def _autopilot(facts: RunFacts) -> Check:
    section = facts.config.get("autopilot", {})
    decided = facts.decisions.decisions if facts.decisions else ()
    rollbacks = [decision for decision in decided if decision.by == "autopilot"]
    if not section.get("spikes"):
        return Check(0, "autopilot", "off: only a loss that is not finite ends the run")
    if not rollbacks:
        return Check(0, "autopilot", "on; no spike was found")
    skipped = sum(d.stage.skip_steps for d in rollbacks if not d.void)
    allowed = section.get("max_rollbacks", 0)
    return Check(
        1,
        "autopilot",
        f"rolled back {counted(len(rollbacks), 'time')} (limit {allowed}) and skipped "
        f"{counted(skipped, 'step')}; "
        "megapack-build trace RUN_DIR/config.yaml --skipped shows them",
    )


def _data_order(facts: RunFacts) -> Iterator[Check]:
    starts = facts.starts
    if not starts:
        return
    changes = [change for start in starts for change in start.get("data_order_changes", [])]
    same = all(start.get("fingerprints") == starts[0].get("fingerprints") for start in starts)
    text = f"{counted(len(starts), 'start')}, documents and samples with the same fingerprints"
    if changes or not same:
        text = "; ".join(changes) or "fingerprints of the data changed"
    yield Check(int(bool(changes) or not same), "data order", text)
    commits = [start.get("git") or {} for start in starts]
    dirty = any(commit.get("dirty") for commit in commits)
    ids = list(dict.fromkeys(str(commit.get("commit"))[:12] for commit in commits if commit))
    if ids:
        uncommitted = ", with uncommitted changes" if dirty else ""
        text = f"commit {', then '.join(ids)}{uncommitted}"
        yield Check(int(dirty or len(ids) > 1), "code", text)


def _saved(facts: RunFacts) -> Check:
    section, steps = facts.config.get("checkpoint", {}), facts.checkpoints
    mirror = section.get("mirror")
    mirrored = f"; mirrored at {mirror}" if mirror else ""
    if not steps:
        return Check(1, "checkpoints", f"none yet{mirrored}")
    since = _num_done(facts) - steps[-1]
    kept = f"; kept: {', '.join(map(count, steps[-12:]))}" if len(steps) > 1 else ""
    ago = f", {counted(since, 'step')} ago" if since > 0 else ""
    return Check(0, "checkpoints", f"newest after {count(steps[-1])} steps{ago}{kept}{mirrored}")


# ---- Sections ------------------------------------------------------------------------------------


def sections(facts: RunFacts) -> Iterator[str]:
    log = facts.log
    losses: list[tuple[str, Draw]] = []
    if log.sources:
        losses.append(("By source", report_charts.loss_by_source))
    if len(report_charts.buckets(facts)) > 1:
        is_mixed = facts.config.get("data", {}).get("mix") == "micro_step"
        title = "By bucket of the first micro step" if is_mixed else "By bucket"
        losses.append((title, report_charts.loss_by_bucket))
    if len(facts.evaluations) > 1:
        losses.append(("Validation", report_charts.validation))
    if log.sources:
        losses.append(("Drawn samples", report_charts.mixture))
    yield _section(
        "Loss",
        "Per label token of a step, over all ranks. Triangles mark decisions of the run and "
        "of its user. Hover over a curve to see values.",
        f"<figure>{draw(report_charts.loss, facts)}</figure>",
        _pair(facts, losses),
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
            "Configuration", "", f"<details><summary>all keys</summary><pre>{text}</pre></details>"
        )


def _section(title: str, text: str, *parts: str) -> str:
    about = f"<p>{text}</p>" if text else ""
    return f"<section><h2>{title}</h2>{about}{''.join(parts)}</section>\n"


def _pair(facts: RunFacts, plots: Sequence[tuple[str, Draw]]) -> str:
    shown = (
        f"<figure><figcaption>{title}</figcaption>{draw(plot, facts)}</figure>"
        for title, plot in plots
    )
    return f"<div class='pair'>{''.join(shown)}</div>" if plots else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 0) -> str:
    """Return a table; the last ``left`` columns are prose. A row that begins with ~ is void."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = []
    for first, *cells in rows:
        css = " class='void'" if first.startswith("~") else ""
        classes = [""] * (len(cells) - left) + [" class='words'"] * left
        tail = "".join(f"<td{c}>{escape(x)}</td>" for c, x in zip(classes, cells, strict=True))
        body.append(f"<tr{css}><th>{escape(first.lstrip('~'))}</th>{tail}</tr>")
    return (
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _program(facts: RunFacts) -> Iterator[str]:
    order = facts.starts[-1].get("data_order", {}) if facts.starts else {}
    names = facts.starts[-1].get("sources", []) if facts.starts else []
    decisions = facts.decisions.decisions if facts.decisions else ()
    decided = {decision.begin for decision in decisions if not decision.void}
    rows: list[tuple[int, list[str]]] = []
    before: Mapping[str, Any] = order
    for stage in order.get("stages", ()):
        if stage["from_step"] not in decided:
            rows.append((stage["from_step"], ["written", _changes(before, stage, names), ""]))
        before = stage
    for decision in decisions:
        weights = decision.stage.weights
        change = f"skips {counted(decision.stage.skip_steps, 'step')}"
        if weights is not None:
            change = _weights(list(weights), list(weights.values()))
        by = f"{decision.by}{' (rolled back)' if decision.void else ''}"
        why = f"losses: {decision.reason}" if decision.by == "mixing" else decision.reason
        rows.append((decision.begin, [by, change, why]))
    if not rows:
        return
    rows.sort(key=lambda row: row[0])
    begin = escape(_weights(names, order.get("weights") or []))
    more = f" The last {ROWS} of {len(rows):,}." if len(rows) > ROWS else ""
    shown = [[f"{'~' * by.endswith(')')}{count(s)}", by, *why] for s, (by, *why) in rows[-ROWS:]]
    yield _section(
        "Stages and decisions",
        f"{begin} from step 0 on; then the stages of the manifest and the decisions of the run "
        f"itself (decisions.json), in the order in which they take effect.{more}",
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


_DEFAULTS = {"loss_weights": 1.0, "fim_rates": 0.0}  # of sources that a stage does not name


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the settings in which a stage differs from the one before it."""
    changes: list[str] = []
    previous: Any
    for key in dict.fromkeys((*after, *_DEFAULTS, "attention_window")):
        value, previous = after.get(key), 0 if key == "skip_steps" else before.get(key)
        if key in _DEFAULTS:  # per source; only sources that are drawn matter
            pairs = zip_longest(value or (), previous or (), fillvalue=_DEFAULTS[key])
            rows = zip(names, pairs, after["weights"], strict=False)
            named = [f"{name} {now:g}" for name, (now, then), w in rows if w != 0 and now != then]
            changes += [f"{key} {', '.join(named)}"] if named else []
        elif key not in ("from_step", "skipped") and value != previous:
            text = f"{key} {value or 'none'}"
            changes.append(_weights(names, value or ()) if key == "weights" else text)
    return ", ".join(changes) or "no change of the drawn samples"


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
    """Return the table of ranks that were slowest, or waited longest, in most log lines."""
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
