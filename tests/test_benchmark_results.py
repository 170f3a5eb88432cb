"""A result file says what was measured with: commit, versions, hardware."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import common
import report

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
