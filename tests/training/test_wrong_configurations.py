"""Wrong starts end with status 2 and one line that names the key, before there are processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Corpus
from .processes import ROOT, Zygote, environment, not_logged
from .wrong_configurations import CASES, Case

WORKER = Path(__file__).with_name("wrong_configurations.py")


@pytest.fixture(scope="module")
def config(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.config(tmp_path_factory.mktemp("wrong") / "run")


@pytest.fixture(scope="module")
def outcomes(zygote: Zygote, config: Path) -> dict[str, dict[str, Any]]:
    """Return the outcomes of all cases by name; late ones run after all imports."""
    command = [sys.executable, str(WORKER), str(config)]
    early = subprocess.run(
        [*command, "early"], capture_output=True, text=True, check=True, cwd=ROOT, env=environment()
    )
    late = zygote.start([*command[1:], "late"], 1, config.with_suffix(".log")).succeed()
    lines = [line for line in (early.stdout + late).splitlines() if line.startswith("{")]
    return {outcome["name"]: outcome for outcome in map(json.loads, lines)}


def test_wrong_configurations_are_different() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 120
    assert sum(not case.late for case in CASES) >= 100


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_errors_name_the_key_in_one_line(
    case: Case, outcomes: dict[str, dict[str, Any]], config: Path
) -> None:
    outcome = outcomes[case.name]
    assert outcome["code"] == 2, outcome
    [line] = not_logged(outcome["stderr"])
    assert case.named in line and len(line) < 1000
    assert not outcome["joined"], "a process group exists"
    assert case.late or not outcome["heavy"], "it was refused too late"
    assert not config.with_suffix("").exists(), "the run left a directory"


@pytest.mark.parametrize(
    ("word", "named"), [("num_step=5", "num_step"), ("data.prefix=nowhere", "nowhere")]
)
def test_wrong_configuration_ends_its_process(word: str, named: str, config: Path) -> None:
    command = [sys.executable, "-m", "megapack.training.pretrain", "--config", str(config)]
    command += ["--set", word]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment()
    )
    errors = not_logged(done.stderr.splitlines())
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    assert named in errors[0]
    assert not config.with_suffix("").exists()
