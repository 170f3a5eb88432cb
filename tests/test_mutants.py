"""The kept mutants fit the sources, and their runner reports killed and survived."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import mutants
import pytest
from mutants import MUTANTS, ROOT, Mutant


def test_mutants_fit_the_sources() -> None:
    """Update a stale mutant to the present text of its line (see tests/mutants.py)."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    found = {m.name: (ROOT / m.file).read_text().count(m.old) for m in MUTANTS}
    assert {name: times for name, times in found.items() if times != 1} == {}
    for mutant in MUTANTS:
        assert mutant.new != mutant.old, mutant.name
        for word in mutant.tests.split():
            assert "/" not in word or (ROOT / word).exists(), f"{mutant.name}: {word}"


SOURCE = "def larger(a, b):\n    return a if a > b else b\n"
TESTS = """
from product import larger

def test_the_larger_is_found():
    assert larger(1, 2) == larger(2, 1) == 2
"""


def test_run_reports_the_result_of_each_mutant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "product.py").write_text(SOURCE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_product.py").write_text(TESTS)
    killed = Mutant("smaller", "product.py", "a > b", "a < b", "tests/test_product.py", "all")
    asleep = "    __import__('time').sleep(99)\n    return"
    others = [
        replace(killed, name="hangs", old="    return", new=asleep),
        replace(killed, name="equal", new="a >= b"),
        replace(killed, name="stale", old="a >  b"),
        replace(killed, name="broken", new="a >"),
    ]
    monkeypatch.setattr(mutants, "SECONDS", 20)
    assert not mutants.run([killed, *others], tmp_path, jobs=2)
    said = capsys.readouterr().out
    assert "2 of 5 killed" in said and (tmp_path / "product.py").read_text() == SOURCE
    for words in (
        *(r"smaller +\d+ s  killed", r"hangs +\d+ s  killed", r"equal +\d+ s  survived"),
        *("stale .* stale: .* 0 times", "broken .* do not run"),
    ):
        assert re.search(words, said), said
