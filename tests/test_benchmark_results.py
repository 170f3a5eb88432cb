"""A result file says what was measured with: commit, versions, hardware."""

from __future__ import annotations

import importlib
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import common
import report
from tables import rounded

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[1]


def test_results_carry_the_commit_and_all_versions_that_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    run = json.loads(common.write_results("packing", [{"ns": 1.5}]).read_text())
    assert run["results"] == [{"ns": 1.5}]
    # The peers of the benchmarks, and what runs beneath both sides.
    assert {"megapack", "numpy", "torch", "megatron-core", "trl", "tokenizers", "gigatoken"} <= set(
        run["versions"]
    )
    if shutil.which("git") and (ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", run["commit"])
        assert f"commit {run['commit'][:12]}" in report.provenance(run)


def test_outside_of_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert common.commit() is None
    run = {"date": "d", "num_cpus": 2, "cpu": "c", "machine": "m", "python": "3", "versions": {}}
    assert "commit" not in report.provenance(run)


def test_the_page_of_results_is_what_the_command_writes_of_the_logged_runs() -> None:
    runs = report.newest_runs(report.LOGGED)
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert page == report.summary(runs, report.listed(runs)), "run `make bench-report`"
    assert len(page.splitlines()) <= 150
    assert len(report.QUESTIONS) == 10
    assert "(not measured)" not in page
    for target in re.findall(r"\]\(([\w./]+)\)", page):
        assert (ROOT / "docs" / target).is_file(), target


def test_what_did_not_hold_stands_on_the_page() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    wrong = [
        claim["claim"]
        for name, run in report.newest_runs(report.LOGGED).items()
        if name.startswith("papers-") and name != "papers-composition"
        for claim in run["results"]["claims"]
        if claim["agrees"] == "no"
    ]
    assert wrong
    assert [claim for claim in wrong if f"| {claim} |" not in page] == []


def test_run_is_kept_with_the_docs_unless_it_says_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "LOGGED", tmp_path)
    run = {"benchmark": "data", "date": "2026-11-20", "quick": False, "results": [1]}
    report.log({"data": run})
    for changes, wanted in (
        ({"quick": True, "date": "2026-11-22"}, [1]),
        ({"date": "2026-11-19"}, [1]),
        ({"date": "2026-11-20"}, [2]),
    ):
        report.log({"data": {**run, "results": [2], **changes}})
        assert report.newest_runs(tmp_path)["data"]["results"] == wanted


def test_parts_of_a_benchmark_take_the_place_of_their_own_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONLY=... by several processes, or later: nothing is joined by hand, and nothing lost."""
    monkeypatch.setattr(report, "LOGGED", tmp_path / "logged")
    monkeypatch.setattr(common, "RESULTS", tmp_path)

    def measure(host: str, **parts: int) -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        for part, value in parts.items():  # each by itself
            rows = [{"part": part, "row": i, "found": value} for i in range(2)]
            common.write_results("edits", {"setup": {"steps": 9}, "rows": rows}, parts="part")

    def logged() -> list[tuple[str, int]]:
        report.log(report.newest_runs(tmp_path))
        results = report.newest_runs(report.LOGGED)["edits"]["results"]
        assert results["setup"] == {"steps": 9}
        assert results["measured"][0].keys() == {"part", "date", "commit", "cpu", "load_average"}
        assert [row["row"] for row in results["rows"]] == [0, 1] * len(results["measured"])
        return [(row["part"], row["found"]) for row in results["rows"][::2]]

    measure("a", noise=1, seeds=2)
    measure("b", mirror=3)
    assert logged() == [("noise", 1), ("seeds", 2), ("mirror", 3)]
    for path in tmp_path.glob("*.json"):
        path.unlink()
    measure("a", mixing=5, seeds=4)
    assert logged() == [("noise", 1), ("seeds", 4), ("mirror", 3), ("mixing", 5)]
    monkeypatch.setenv("QUICK", "1")
    measure("z", noise=6)
    assert logged()[0] == ("noise", 1)


def test_part_that_nobody_knows_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ONLY", raising=False)
    assert common.only(["a", "b"]) == ["a", "b"]
    monkeypatch.setenv("ONLY", "b,x")
    with pytest.raises(SystemExit, match="ONLY names x; there are a, b"):
        common.only(["a", "b"])
    assert common.only(["a", "b"], others="bench-edits") == ["b"]
    assert capsys.readouterr().out == "ONLY names x; there are a, b, and those of bench-edits\n"


def test_logs_of_a_run_are_compared_step_by_step() -> None:
    whole = [{"step": i, "samples": i, "loss": 2.0} for i in range(3)]
    equal = {"same_samples": True, "loss_differs": 0.0, "lines_twice": 0}
    assert common.compare_logs(whole, whole) == equal
    again = [*whole[:2], *whole[1:]]  # a step that was taken twice counts as it was taken last
    assert common.compare_logs(again, whole) == {**equal, "lines_twice": 1}
    other = [*whole[:2], {"step": 3, "samples": 2, "loss": 3.0}]
    assert not common.compare_logs(other, whole)["same_samples"]
    for nothing in (None, math.nan):
        lost = [whole[0], {**whole[1], "loss": nothing}, whole[2]]
        assert math.isnan(common.compare_logs(lost, whole)["loss_differs"])


def test_figure_that_is_no_number_is_shown_as_it_is() -> None:
    assert [rounded(value) for value in (math.nan, math.inf, 1.5)] == ["nan", "inf", "1.50"]


def test_what_the_pages_are_made_of_is_in_every_clone() -> None:
    """Files that git ignores are missing in a clone, where the page would differ."""
    if not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("no git checkout")
    git = ["git", "-C", str(ROOT), "ls-files", "docs/results/*.json"]
    tracked = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split()
    assert {Path(path).stem for path in tracked} == set(report.newest_runs(report.LOGGED))


def test_both_sides_of_a_benchmark_are_warmed_and_take_turns() -> None:
    calls: list[str] = []
    sides = {name: partial(calls.append, name) for name in ("ours", "theirs")}
    found = common.take_turns(sides, windows=3)
    assert calls == ["ours", "theirs"] * 4  # the first of each is not timed
    assert {len(timing.windows) for timing in found.values()} == {3}
    timing = common.Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert timing.seconds == 3.0 and timing.rate == pytest.approx(1 / 3)
    assert timing.spread == pytest.approx((4.0 - 2.0) / 3.0)


def test_units_of_a_call_are_counted() -> None:
    """Four units in 2 ms: each takes at least half a millisecond."""
    found = common.take_turns({"rows": lambda: (time.sleep(0.002), common.Units(4))[1]}, windows=1)
    assert found["rows"].seconds >= 0.0005


def test_a_peer_that_is_not_found_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "peer_of_a_test.py").write_text("import nothing_of_this_name\n")
    monkeypatch.setattr(sys, "path", [*sys.path])

    def load() -> str:
        return importlib.import_module("peer_of_a_test").__name__

    monkeypatch.delenv("PEER", raising=False)
    assert common.peer_of("P", load, "PEER", "src") is None
    monkeypatch.setenv("PEER", str(tmp_path))
    assert common.peer_of("P", load, "PEER", "src") is None
    (tmp_path / "src" / "peer_of_a_test.py").write_text("")
    assert common.peer_of("P", load, "PEER", "src") == "peer_of_a_test"
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "skipped: P (set PEER to its checkout)",
        "skipped: P (No module named 'nothing_of_this_name')",
    ]
