"""Who adds a strategy touches the four places that CONTRIBUTING names, and no others."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megapack.cli.main import main
from megapack.packing import STRATEGIES, pack

ROOT = Path(__file__).parents[2]
PLACES = (
    r"csrc/core/packing/\w+\.[ch]pp",
    r"csrc/bindings/register_packing\.cpp",
    r"megapack/packing/strategies\.py",
    r"tests/(reference/\w+\.py|cpp/\w+\.cpp)",
)
# What is compared by default, and in which words, is a choice and not a part of a strategy.
CHOICES = r"megapack/(compare|cli)/"


def files_that_name(strategy: str) -> set[str]:
    """Sources of the core, the package and the tests' definitions, without their comments."""
    found = set()
    for top in ("csrc", "megapack", "tests/reference", "tests/cpp"):
        for path in sorted((ROOT / top).rglob("*.*")):
            name = str(path.relative_to(ROOT))
            if path.suffix not in (".py", ".pyi", ".cpp", ".hpp") or re.match(CHOICES, name):
                continue
            code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
            if re.search(rf"\b(pack_)?{strategy}\b", code):
                found.add(name)
    return found


# Strategies that need nothing special, and whose names mean nothing else.
@pytest.mark.parametrize("name", ["next_fit", "length_sorted", "bucket_naive"])
def test_a_strategy_stands_in_four_places(name: str) -> None:
    found = files_that_name(name)
    for place in PLACES:
        assert any(re.fullmatch(place, path) for path in found), f"{name} is not in {place}"
    elsewhere = {path for path in found if not re.fullmatch("|".join(PLACES), path)}
    assert not elsewhere, f"{name} is also in {sorted(elsewhere)}"


def test_contributing_names_these_places() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = text[text.index("**a strategy?**") : text.index("**where a step becomes a batch?**")]
    for place in (
        "csrc/core/packing",
        "csrc/bindings/register_packing.cpp",
        "megapack/packing/strategies.py",
        "tests/reference",
        "tests/cpp/test_strategies.cpp",
    ):
        assert f"`{place}`" in named and (ROOT / place).exists()


def test_every_strategy_of_the_core_is_used_and_runs_under_the_sanitizers() -> None:
    def names(pattern: str, path: str) -> set[str]:
        return set(re.findall(pattern, (ROOT / path).read_text(encoding="utf-8")))

    core = names(r"(?m)^ +MEGAPACK_STRATEGY\((\w+),", "csrc/bindings/register_packing.cpp")
    assert len(core) == 10
    assert core <= names(r'"(\w+)"', "megapack/packing/strategies.py")
    assert core <= names(r"MEGAPACK_RUN\((\w+),", "tests/cpp/test_strategies.cpp")


def test_an_entry_in_the_registry_is_all_that_python_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = replace(STRATEGIES["next_fit"], name="a_new_one", description="what it does")
    monkeypatch.setitem(STRATEGIES, "a_new_one", new)
    index = pack([5, 9, 12], "a_new_one", buckets=16, shuffle=False)
    assert index.strategy == "a_new_one" and index.num_samples == 2
    with pytest.raises(SystemExit, match="0"):
        main(["pack", "--help"])
    assert "a_new_one" in capsys.readouterr().out
