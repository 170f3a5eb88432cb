"""What fuzzing once found stays found: every kept input, and a few thousand new ones."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
from peers import peer

from fuzz.run import (
    build_cpp,
    corpus,
    cpp_targets,
    inputs,
    python_targets,
    run_one,
    seed_files,
)

NEW_INPUTS = 150


@pytest.mark.parametrize("name", sorted(python_targets()))
def test_kept_and_new_inputs_are_handled(name: str) -> None:
    if name in ("damage", "samples"):
        peer("torch")  # which gathers what was accepted
    target = python_targets()[name]
    kept = [path.read_bytes() for path in corpus(name)]
    new = itertools.islice(inputs(name, target), NEW_INPUTS)
    for data in [*target.SEEDS, *kept, *new]:
        problem = run_one(target, data)
        assert problem is None, f"{data!r}\n{problem}"


@pytest.mark.parametrize("name", sorted(cpp_targets()))
def test_kept_and_new_inputs_do_not_crash_the_core(name: str, tmp_path: Path) -> None:
    build_cpp(cpp_targets()[name], tmp_path / "fuzz")
    command = [str(tmp_path / "fuzz"), "1", str(tmp_path / "current")]
    done = subprocess.run(
        [*command, *seed_files(name, tmp_path)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "mutated inputs" in done.stdout
