"""Imports run one way, as CONTRIBUTING says, without cycles; building data needs no torch."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from peers import peer
from programs import PYTHON, ended

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megapack"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

# Package -> packages that it may import (also itself and the ground floor).
GROUND = {"errors", "calls", "command_line", "config", "json_schema", "records", "units"}
GROUND |= {"devices", "executors", "hub", "_core", "__version__"}
MAY_IMPORT: dict[str, set[str]] = {
    "storage": set(),
    "tokenization": {"storage"},
    "packing": {"storage"},
    "planning": set(),
    "compare": {"packing", "planning"},
    "data": {"storage", "tokenization", "packing"},
    "probe": set(),
    "attention": {"probe"},
    "training": {"storage", "packing", "data", "attention", "probe"},
    "integrations": {"storage", "packing", "planning", "data", "attention", "probe"},
    "cli": {"storage", "tokenization", "packing", "planning", "compare", "data", "training"},
}
# Modules that a package may import from a package with many imports.
ONLY = {
    ("cli", "training"): {
        "megapack.training.config",
        "megapack.training.engine.directory",
        "megapack.training.monitoring.slowdowns",
        "megapack.training.mixtures",
        "megapack.training.proxy",
    }
}
TORCH_FREE = (
    *("storage", "tokenization", "packing", "planning", "compare", "cli"),
    *("errors", "calls", "command_line", "config", "records", "units", "devices", "executors"),
    *(
        "hub",
        "data/run",
        "training/config",
        "training/proxy",
        "training/mixtures",
    ),  # checked before torch is imported
    *("data/loader", "integrations/dialects", "integrations/hosts/jax"),  # arrays of numpy
    *("training/engine/directory", "training/monitoring/slowdowns"),  # a run is read
)


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_those_below_it(package: str) -> None:
    files = sorted((PACKAGE / package).rglob("*.py"))
    assert files, f"{package} has no files: the test would pass vacuously"
    for path in files:
        names = {name for name in _imports(path) if name.startswith("megapack.")}
        imported = {name.split(".")[1] for name in names}
        above = imported - MAY_IMPORT[package] - {package} - GROUND
        assert not above, f"{path} imports {sorted(above)}, which {package} may not import"


@pytest.mark.parametrize(("package", "below"), ONLY)
def test_restricted_imports_are_exact(package: str, below: str) -> None:
    paths, known = sorted((PACKAGE / package).rglob("*.py")), _modules()
    imported = set().union(*(_imported_modules("", path, known) for path in paths))
    found = {name for name in imported if name.startswith(f"megapack.{below}")}
    assert found == ONLY[package, below]


# Packages with subpackages, each of which imports only earlier ones.
WINGS = {
    "tokenization": ("corpus", "tokenizers", "pipeline"),
    "training": ("model", "engine", "monitoring"),
    "integrations": ("rows", "hosts"),
}


@pytest.mark.parametrize("package", WINGS)
def test_wings_import_only_earlier_ones(package: str) -> None:
    wings = WINGS[package]
    known = _modules()
    assert {p.parent.name for p in (PACKAGE / package).glob("*/__init__.py")} == set(wings)
    for place, wing in enumerate(wings):
        paths = sorted((PACKAGE / package / wing).rglob("*.py"))
        assert len(paths) > 2, f"{wing} has no files: the test would pass vacuously"
        for path in paths:
            imported = _imported_modules("", path, known)
            for above in wings[place + 1 :]:
                found = [name for name in imported if f"{package}.{above}" in name]
                assert not found, f"{path} imports {found}, which {wing} may not import"


def test_every_package_is_listed() -> None:
    assert {p.parent.name for p in PACKAGE.glob("*/__init__.py")} == set(MAY_IMPORT)


def test_contributing_lists_the_same_imports() -> None:
    rows = re.findall(r"^\| `megapack/(\w+)` \|.*\|([^|]*)\|$", CONTRIBUTING, re.MULTILINE)
    assert {name: set(re.findall(r"\w+", allowed)) for name, allowed in rows} == MAY_IMPORT


def test_paths_in_contributing_exist() -> None:
    layout = CONTRIBUTING[CONTRIBUTING.index("## Package layout") :]
    quoted = set(re.findall(r"`([\w./]+)`", layout))
    paths = {name for name in quoted if "/" in name}
    names = {name for name in quoted if name.startswith("megapack.")}
    assert len(paths) > 15 and len(names) >= 4
    assert not [name for name in paths if not (ROOT / name).exists()]
    peer("torch")  # which megapack.data needs
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def _modules() -> dict[str, Path]:
    """Return dotted name -> file of megapack and benchmarks/ (whose folder is on the path)."""
    found = {}
    for top, base in ((PACKAGE, ROOT), (ROOT / "benchmarks", ROOT / "benchmarks")):
        for path in sorted(top.rglob("*.py")):
            name = ".".join(path.relative_to(base).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def _imports(path: Path) -> set[str]:
    """Return dotted names that a file imports, also in functions and under TYPE_CHECKING."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _imported_modules(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return modules of this repository that a file imports, also for types."""
    return {_nearest(one, known) for one in _imports(path)} - {name, ""}


def _nearest(name: str, known: dict[str, Path]) -> str:
    """Return the module that holds a dotted name; "" for other repositories."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def test_no_modules_import_each_other_in_a_circle() -> None:
    known = _modules()
    assert len(known) > 150 and "papers.worker" in known
    graph = {name: _imported_modules(name, path, known) for name, path in known.items()}
    assert "megapack.storage.files" in graph["megapack.packing.sample_index"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


# Two classes of one name, to be renamed; Megatron's IndexedDataset is subclassed under its name.
SAME_NAME = {"IndexedDataset", "IndexedDatasetBuilder"}


def test_no_two_public_classes_have_one_name() -> None:
    homes = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert len(homes) > 100
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert set(twice) <= SAME_NAME, twice


IMPORTS = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "deepspeed"):
            raise ImportError("refused: " + name)
sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_building_data_never_imports_torch_or_deepspeed() -> None:
    modules = []
    for name in TORCH_FREE:
        place = PACKAGE / name
        paths = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        for path in paths:
            dotted = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            modules.append(dotted.removesuffix(".__init__"))
    assert len(modules) > len(TORCH_FREE)
    ended(*PYTHON, IMPORTS, *modules)


LAZY = ("megapack", "megapack.data", "megapack.integrations.hosts.megatron")


@pytest.mark.parametrize("package", LAZY)
def test_public_names_that_are_imported_when_asked_for_have_a_home(package: str) -> None:
    peer("torch")  # which some of them need
    if package.endswith("megatron"):
        peer("megatron.core")
    names = importlib.import_module(package).__all__
    assert len(names) > 1
    for name in names:
        assert hasattr(importlib.import_module(package), name), name


def test_packages_with_names_that_are_imported_when_asked_for_are_all_listed() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in PACKAGE.rglob("__init__.py")
        if "def __getattr__" in path.read_text(encoding="utf-8")
    }
    assert found == set(LAZY)
