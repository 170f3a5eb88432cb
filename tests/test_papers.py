"""docs/papers.md names functions, tests and files that exist."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from megapack.packing import STRATEGIES

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", PAGE)))


def defined_in(path: Path) -> set[str]:
    """Return the names of the functions and classes of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_dotted_name_can_be_imported() -> None:
    names = [name for name in QUOTED if re.fullmatch(r"megapack(\.\w+)+", name)]
    assert len(names) >= 20
    for name in names:
        parts = name.split(".")
        for split in range(len(parts), 0, -1):
            try:
                value = importlib.import_module(".".join(parts[:split]))
            except ModuleNotFoundError:
                continue
            break
        for attribute in parts[split:]:
            assert hasattr(value, attribute), f"docs/papers.md names {name}, which does not exist"
            value = getattr(value, attribute)


def test_every_file_exists() -> None:
    paths = [name for name in QUOTED if re.fullmatch(r"[\w./-]+/[\w.-]+\.(py|cpp|md|yaml)", name)]
    assert len(paths) >= 15
    for path in paths:
        assert (ROOT / path).is_file(), f"docs/papers.md names {path}, which does not exist"


def test_functions_named_with_a_file_are_defined_in_it() -> None:
    pairs = re.findall(r"`(\w+)`(?:, `(\w+)`)? in `([\w./]+\.py)`", PAGE)
    pairs += [(a, b, path) for path, a, b in re.findall(
        r"`([\w./]+\.py)`: `(\w+)`(?:, `(\w+)`)?", PAGE)]  # fmt: skip
    assert len(pairs) >= 20
    for first, second, path in pairs:
        known = defined_in(ROOT / path)
        for name in filter(None, (first, second)):
            assert name in known, f"docs/papers.md looks for {name} in {path}"


def test_every_strategy_is_on_the_page_except_our_own() -> None:
    assert [name for name in STRATEGIES if f"`{name}`" not in PAGE] == ["bucket"]
