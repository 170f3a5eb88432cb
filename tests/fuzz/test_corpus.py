"""Fuzz targets handle all kept inputs and a few thousand new ones."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from peers import peer

from fuzz.run import BATCH, build_cpp, corpus, cpp_targets, inputs, python_targets, run_cpp, run_one

NEW_INPUTS = 150


@pytest.mark.parametrize("name", sorted(python_targets()))
def test_kept_and_new_inputs_are_handled(name: str) -> None:
    if name in ("damage", "samples"):
        peer("torch")  # for the gather of accepted inputs
    target = python_targets()[name]
    kept = [path.read_bytes() for path in corpus(name)]
    new = itertools.islice(inputs(name, target), NEW_INPUTS)
    for data in [*target.SEEDS, *kept, *new]:
        problem = run_one(target, data)
        assert problem is None, f"{data!r}\n{problem}"


# One test, because several test processes would each compile the driver.
def test_kept_and_new_inputs_do_not_crash_the_core(tmp_path: Path) -> None:
    assert cpp_targets()
    for name, source in cpp_targets().items():
        build_cpp(source, tmp_path / name)
        kept = [path.read_bytes() for path in corpus(name)]
        target = python_targets()[name]
        new = itertools.islice(inputs(name, target), BATCH)
        assert run_cpp(tmp_path / name, [*target.SEEDS, *kept, *new]) is None
