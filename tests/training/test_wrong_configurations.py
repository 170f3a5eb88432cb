"""Wrong starts end with status 2 and one line that names the key, before there are processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Corpus
from .processes import ROOT, environment
from .wrong_configurations import CASES, HEAVY, Case

# What may be imported by the time a case is refused.
MAY_IMPORT = {"": (), "torch": HEAVY, "model": HEAVY}


@pytest.fixture(scope="module")
def config(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.config(tmp_path_factory.mktemp("wrong") / "run")


@pytest.fixture(scope="module")
def outcomes(config: Path) -> dict[str, dict[str, Any]]:
    """Of all cases by name, those that need the same in one process."""
    found = {}
    for needs in MAY_IMPORT:
        command = [sys.executable, "-m", "tests.training.wrong_configurations", str(config), needs]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment()
        )
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found |= {outcome["name"]: outcome for outcome in map(json.loads, lines)}
    return found


def test_wrong_configurations_are_many_and_different() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 120
    assert sum(case.needs == "" for case in CASES) >= 100


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_one_line_names_key(case: Case, outcomes: dict[str, dict[str, Any]], config: Path) -> None:
    outcome = outcomes[case.name]
    assert outcome["code"] == 2, outcome
    [line] = outcome["stderr"]
    assert case.named in line and len(line) < 1000
    assert not outcome["joined"], "a process group exists"
    assert set(outcome["heavy"]) <= set(MAY_IMPORT[case.needs]), "it was refused too late"
    assert not config.with_suffix("").exists(), "the run has left something behind"


SAMPLE = [
    case
    for number, case in enumerate(CASES)
    if number % 48 == 3 and case.yaml is None and case.blend is None and not case.environment
]


@pytest.mark.parametrize("case", SAMPLE, ids=[case.name for case in SAMPLE])
def test_a_wrong_configuration_ends_its_process(case: Case, config: Path) -> None:
    words = [part for word in case.words for part in _words(word)]
    command = [sys.executable, "-m", "megapack.training.pretrain", "--config", str(config), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment()
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert case.named in done.stderr
    assert not config.with_suffix("").exists()


def _words(word: str) -> list[str]:
    return ["--set", word] if "=" in word and not word.startswith("-") else [word]
