"""megapack-build report: one page about a run, from the files of its directory."""

from __future__ import annotations

import json
import math
import os
import re
import time
from html import escape
from pathlib import Path
from typing import Any

import pytest
import yaml
from html_pages import assert_stands_alone, words_of

from megapack.cli.main import main
from megapack.cli.report import checks, run_page, tiles
from megapack.cli.report_charts import (
    NUM_BINS,
    Bins,
    RunLog,
    gradients,
    loss,
    loss_by_source,
    read_run,
    throughput,
)
from megapack.data.blend import Stage
from megapack.data.run import Decision, Decisions
from megapack.training.engine.directory import append_jsonl
from megapack.units import percent, short

FINGERPRINTS = {"web": "1f"}


def lines(num_steps: int, *, sources: tuple[str, ...] = (), every: int = 5) -> list[dict[str, Any]]:
    """Return a log whose loss is 2 + 2 / (step + 1) and in whose last line rank 1 is slow."""
    made = []
    for step in range(num_steps):
        loss = 2 + 2 / (step + 1)
        line = {
            "step": step, "loss": loss, "grad_norm": 0.5, "lr": 1e-3, "seconds": 0.5,
            "tokens_seen": 1024 * (step + 1), "capacity": 64 << step % 2, "label_tokens": 100,
            "tokens": 1024, "useful_tokens": 1000, "tokens_per_second": 2048.0,
            "useful_tokens_per_second": 2000.0, "data_wait": 0.001, "data_wait_share": 0.002,
            "imbalance": 1.05, "padding": 24 / 1024, "memory_gib": 1.5, "mfu": None,
            "naive_mfu": None, "skipped": False,
        }  # fmt: skip
        if sources:
            line["source_loss"] = {name: loss + i for i, name in enumerate(sources)}
            line["source_label_tokens"] = {name: 100 >> i for i, name in enumerate(sources)}
        if (step + 1) % every == 0:
            most = 3.0 if step + 1 == num_steps else 1.1
            line["rank_forward"] = {"median": 1.0, "most": most, "rank": 1, "host": "node1"}
            line["rank_data_wait"] = {"median": 0.0, "most": 0.01, "rank": 0, "host": "node0"}
        made.append(line)
    return made


def write_log(path: Path, log: list[dict[str, Any]]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return path


def start(step: int, ranks: int, **more: Any) -> dict[str, Any]:
    order = {"weights": [3, 1], "tokens_per_step": 1024, "stages": [
        {"from_step": 20, "weights": [3, 1], "tokens_per_step": 2048}]}  # fmt: skip
    return {
        "time": 1.7e9 + step, "step": step, "num_steps": 100, "world_size": ranks, "host": "node0",
        "device": "H100", "parameters": 82_000, "fingerprints": FINGERPRINTS, "data_order": order,
        "data_order_changes": [], "sources": ["web", "co<de"], "versions": {"torch": "2.13"},
        "git": {"commit": "0123456789abcdef", "dirty": False}, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run directory with all files, and a branch of it."""
    path = write_log(
        tmp_path_factory.mktemp("runs") / "tr<unk>", lines(60, sources=("web", "co<de"))
    )
    tree = {
        "num_steps": 100,
        "autopilot": {"spikes": True, "max_rollbacks": 10},
        "checkpoint": {"mirror": "s3://bucket/run"},
        "logging": {"every": 5},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(tree))
    starts = [start(0, 2), start(30, 4)]
    (path / "starts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in starts))
    (path / "end.json").write_text(
        json.dumps({"reason": "running", "pid": 7, "host": "node0", "step": 60, "saved": 40})
    )
    valid = [
        {
            "step": step, "loss": 2.2, "perplexity": 9.0, "source_loss": {"web": 2.2},
            "source_perplexity": {"web": 9.0, "co<de": 8.0},
        }
        for step in (20, 40)
    ]  # fmt: skip
    (path / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in valid))
    learned = Decision(
        by="mixing", step=36, reason="web 2.1", stage=Stage(from_step=36, weights={"web": 1.0})
    )
    back = Decision(
        by="autopilot", step=35, reason="loss 9 at step 33, where 2.1 is usual",
        stage=Stage(from_step=32, skip_steps=5),
    )  # fmt: skip
    decided = Decisions(num_epochs=1, num_steps=100, decisions=(learned,)).with_new(back)
    decided.write(path)
    for step in (20, 40):
        (path / "checkpoints" / f"step_{step:08d}_tokens_{step * 1024}").mkdir(parents=True)
    branch = write_log(path.parent / "branch", lines(50))
    origin = str(path / "checkpoints" / "step_00000040_tokens_40960")
    (branch / "config.yaml").write_text(yaml.safe_dump({"checkpoint": {"branch_from": origin}}))
    for name, text in (("stranger", b"checkpoint: none"), ("broken", b"{"), ("bytes", b"\xff\x00")):
        (write_log(path.parent / name, lines(2)) / "config.yaml").write_bytes(text)
    (path.parent / "damaged").mkdir()
    (path.parent / "damaged" / "config.yaml").write_text((branch / "config.yaml").read_text())
    (path.parent / "damaged" / "log.jsonl").write_text("no JSON\n")
    return path


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return run_page(read_run(run))


def said(run: Path) -> dict[str, str]:
    return {check.what: check.sentence for check in checks(read_run(run))}


def test_page_is_self_contained(page: str) -> None:
    assert_stands_alone(page)


def test_page_shows_all_facts(page: str) -> None:
    text = words_of(page)
    assert "tr<unk>" in text and "<unk>" not in page, "names are escaped"
    for said in (
        "82 k parameters, 61.4 k tokens seen, 4 ranks on H100, started 2023-11-14 ",
        "step 60 of 100",
        f"training loss {sum(2 + 2 / (i + 1) for i in range(54, 60)) / 6:.4f}",
        "validation perplexity 9 after step 40",
        "autopilot : rolled back 1 time (limit 10) and skipped 5 steps",
        "data order : 2 starts, documents and samples with the same fingerprints",
        "code : commit 0123456789ab",
        "newest after 40 steps, 20 steps ago; kept: 20, 40; mirrored at s3://bucket/run",
        "slow rank : rank 1 on node1 computes 3.00 times as long as the median",
        "web 75.0 %, co<de 25.0 % from step 0 on",
        "20 written tokens_per_step 2048",
        "32 autopilot skips 5 steps loss 9 at step 33, where 2.1 is usual",
        "36 mixing (rolled back) web 100.0 % losses: web 2.1",
        "branch 40 50 2.0",
        "damaged 40 - - unknown",
        "rank 1 on node1 slowest forward 12 of 12",
    ):
        assert said in text, said
    assert "stranger" not in text
    labels = re.findall(r'aria-label="([^"]+)"', page)
    assert len(labels) == len(set(labels)) == page.count("<svg ") == 12
    assert "<title>after step 40: validation loss 2.2000</title>" in page
    assert "<title>loss 9 at step 33, where 2.1 is usual</title>" in page


def test_source_names_are_shown_verbatim(tmp_path: Path) -> None:
    """Names become neither entities nor formulas, and matplotlib hides none."""
    names = ["R&D", "_web", "a$b$", "c$d_{$"]
    path = write_log(tmp_path / "run", lines(60, sources=tuple(names)))
    order = {"weights": [1] * 4, "stages": [{"from_step": 20, "weights": [1, 2, 1, 0]}]}
    begin = start(0, 2, sources=names, data_order=order)
    (path / "starts.jsonl").write_text(json.dumps(begin) + "\n")
    page = run_page(read_run(path))
    assert "R&D 25.0 %, _web 50.0 %, a$b$ 25.0 %, c$d_{$ 0.0 %" in words_of(page)
    legends = [len(re.findall(f">{re.escape(escape(name))}</text>", page)) for name in names]
    assert legends == [2, 2, 2, 2], "losses by source, and what was drawn"


def test_stages_list_only_their_changes(tmp_path: Path) -> None:
    """Each skip is listed; a removed source changes no rate; a window may end."""
    rest = {"fim_rates": [0.5, 0.5, 0.5], "attention_window": [512, 0, 0, 0], "skip_steps": 0}
    order = {"weights": [2, 1, 1], "num_cycles": 1, **rest}
    left = {**order, "weights": [2, 1, 0], "fim_rates": [0.5, 0.5]}
    stages = [
        {**order, "from_step": 10, "skip_steps": 7},
        {**left, "from_step": 20, "skip_steps": 7},
        {**left, "from_step": 30, "fim_rates": [0.5, 0.9], "attention_window": None},
        {**left, "from_step": 40, "fim_rates": []},
    ]
    begin = start(0, 2, sources=["web", "code", "math"], data_order={**order, "stages": stages})
    path = write_log(tmp_path / "run", lines(60))
    (path / "starts.jsonl").write_text(json.dumps(begin) + "\n")
    said = words_of(run_page(read_run(path)))
    assert "10 written skip_steps 7 20 written web 66.7 %, code 33.3 %, math 0.0 %, skip" in said
    assert "skip_steps 7 30 written fim_rates code 0.9, attention_window none 40" in said
    assert "40 written fim_rates web 0, code 0, attention_window [512, 0, 0, 0]" in said


def test_silent_run_gets_a_warning(run: Path) -> None:
    log = run / "log.jsonl"
    os.utime(log, (time.time() - 30, time.time() - 30))
    assert "last line of the log 0:00:3" in said(run)["running"]
    os.utime(log, (time.time() - 3600, time.time() - 3600))
    doubted = said(run)["running?"]
    assert "last line of the log 1:00:0" in doubted and "(process 7 on node0)" in doubted


def test_log_alone_suffices_and_a_partial_line_is_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_log(tmp_path / "run", lines(3))
    with (path / "log.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert main(["report", str(path), "--output", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'page.html'}\n"
    text = words_of((tmp_path / "page.html").read_text())
    assert "step 3" in text and "how it ended is not recorded" in text
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} is not a run directory" in capsys.readouterr().err
    (path / "log.jsonl").write_text("")
    assert main(["report", str(path)]) == 1
    assert "has no steps yet" in capsys.readouterr().err


def test_start_after_a_truncated_line_is_listed(tmp_path: Path) -> None:
    """The next start continues the truncated line; the page must accept that."""
    path = write_log(tmp_path, lines(3))
    cut = json.dumps(start(0, 2)) + "\n" + json.dumps(start(10, 2))[:70]
    (path / "starts.jsonl").write_text(cut)
    append_jsonl(path / "starts.jsonl", start(20, 4))
    assert [line["step"] for line in read_run(path).starts] == [0, 20]


def test_page_begins_with_non_finite_loss_and_error(tmp_path: Path) -> None:
    log = lines(30)
    log[29]["loss"] = None
    log[7]["skipped"] = True
    path = write_log(tmp_path / "run", log)
    (path / "end.json").write_text(json.dumps({"reason": "error", "message": "lost rank 5"}))
    for step, of_all, of_web in ((10, 2.5, math.nan), (20, math.inf, 2.0), (30, math.nan, 2.0)):
        line = {"step": step, "loss": of_all, "perplexity": math.inf}
        append_jsonl(path / "evaluation.jsonl", {**line, "source_loss": {"web": of_web}})
    page = run_page(read_run(path))
    assert "<section class='answer bad'>" in page
    first, second = re.findall(r"<li class='bad'>(.*?)</li>", page)
    assert first == "<b>ended</b>: lost rank 5"
    assert second.startswith("<b>losses</b>: NaN or infinite at 1 step, first 29; 1 update skipped")
    assert second.endswith("; the validation loss is NaN or infinite after step 10")


def test_speed_is_tokens_over_time(tmp_path: Path) -> None:
    """The mean of speeds would be too high: a step is recorded before the device finishes it."""
    log = lines(40)
    for item, seconds in zip(log, [0.1, 0.1, 0.1, 1.7] * 10, strict=True):
        of_step = {"seconds": seconds, "useful_tokens_per_second": 1000 / seconds}
        item.update(of_step, data_wait_share=0.001 / seconds, mfu=0.3 * 0.5 / seconds)
    facts = read_run(write_log(tmp_path, log))
    shown = {name: figure for name, figure, _ in tiles(facts)}
    assert shown["useful tokens"] == short(4000 / 2.0) and shown["MFU"] == percent(0.3, 1)
    assert shown["waited for data"] == percent(0.004 / 2.0, 1)
    (_, useful) = throughput(facts).axes.get_lines()
    assert useful.get_ydata() == pytest.approx([2000.0] * 10)


def test_losses_by_bucket_of_mixed_steps_are_titled(tmp_path: Path) -> None:
    path = write_log(tmp_path, lines(3))
    assert "By bucket" in words_of(run_page(read_run(path)))
    (path / "config.yaml").write_text("data: {mix: micro_step}")
    assert "By bucket of the first micro step" in words_of(run_page(read_run(path)))


def test_gradient_norms_within_a_decade_have_ticks(tmp_path: Path) -> None:
    log = lines(9)
    for item in log:
        item["grad_norm"] = 1.3 + 0.2 * item["step"]
    axes = gradients(read_run(write_log(tmp_path, log))).axes
    low, high = axes.get_ylim()
    assert sum(low < tick < high for tick in axes.get_yticks()) >= 1


def test_memory_is_the_peak_of_all_starts(tmp_path: Path) -> None:
    """A later start with less memory, on more ranks, must not replace the peak."""
    log = lines(9)
    log[2]["memory_gib"] = 2.5
    shown = {name: figure for name, figure, _ in tiles(read_run(write_log(tmp_path, log)))}
    assert shown["memory"] == "2.5 GiB"


def test_curve_of_one_step_is_visible(tmp_path: Path) -> None:
    """A line through one point is invisible, so a marker is drawn."""
    facts = read_run(write_log(tmp_path, lines(1, sources=("web",))))
    for chart in (loss(facts), loss_by_source(facts)):
        assert [line.get_marker() for line in chart.axes.get_lines()] == ["o"]


def test_long_source_names_fit_into_the_legend(tmp_path: Path) -> None:
    """Side by side, the second name would be outside of the chart."""
    names = tuple(f"{'common_crawl_' * 8}{i}" for i in range(4))
    chart = loss_by_source(read_run(write_log(tmp_path, lines(9, sources=names))))
    chart.figure.draw_without_rendering()
    (legend,) = chart.figure.legends
    assert legend.get_window_extent().x1 < chart.figure.bbox.x1
    shown = [text.get_text() for text in legend.get_texts()]
    assert [text[-5:] for text in shown] == [name[-5:] for name in names]


def test_page_does_not_grow_with_the_run(tmp_path: Path) -> None:
    names = tuple(f"source{i}" for i in range(9))  # more sources than colours
    sizes = [
        len(run_page(read_run(write_log(tmp_path / str(n), lines(n, sources=names)))))
        for n in (500, 4_000)
    ]
    assert sizes[1] < 1.15 * sizes[0] and sizes[1] < 700_000


def test_bins_are_means_of_consecutive_steps() -> None:
    log = RunLog({"step": i, "loss": None if i == 5 else float(i)} for i in range(1000))
    steps = log.column("step")
    bins = Bins(steps, 10)
    assert bins.num == 10 and bins.steps.tolist() == [49.5 + 100 * i for i in range(10)]
    means = bins.mean(log.column("loss"))
    assert means[1:].tolist() == bins.steps[1:].tolist()
    assert means[0] == pytest.approx((sum(range(100)) - 5) / 99)
    assert [of.tolist()[0] for of in bins.range(log.column("loss"))] == [0.0, 99.0]
    assert Bins(steps).num == NUM_BINS and Bins(steps[:8]).num == 8
    assert math.isnan(Bins(steps[5:6]).mean(log.column("loss")[5:6])[0])


def test_hostile_names_of_sources_are_escaped(tmp_path: Path) -> None:
    """Also a lone surrogate, and text that looks like a formula to matplotlib."""
    sources = ("\ud800a\x1b[2J\u202e\u200b\x9b\x7f", "$x^")
    write_log(tmp_path, lines(60, sources=sources))
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "\\ud800a\\u001b[2J\\u202e\\u200b\\u009b\\u007f" in page
    assert all(character.isprintable() or character in "\n\u00a0" for character in page)


def test_page_shows_the_padding_of_both_capacities(tmp_path: Path) -> None:
    log = [{**line, "second_padding": 0.125} for line in lines(40)]
    one, both = (
        words_of(run_page(read_run(write_log(tmp_path / name, made))))
        for name, made in (("one", lines(40)), ("both", log))
    )
    assert "12.5 % of the second capacities" in both and "second padding" in both
    assert "padding 2.34 % of the positions" in both
    assert "second" not in one.replace("per second", "").replace("seconds", "")
