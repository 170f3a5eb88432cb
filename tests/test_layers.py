"""The imports of megapack run in one direction, and data is built without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megapack"

# Each room and the rooms it may stand on (itself and the ground floor are always allowed).
GROUND = {"errors", "config", "_core", "__version__"}
MAY_IMPORT: dict[str, set[str]] = {
    "storage": set(),
    "tokenization": {"storage"},
    "packing": {"storage"},
    "compare": {"packing"},
    "data": {"storage", "packing"},
    "attention": set(),
    "training": {"storage", "packing", "data", "attention"},
    "integrations": {"storage", "packing", "data", "attention"},
    "cli": {"storage", "tokenization", "packing", "compare"},
}
TORCH_FREE = ("storage", "tokenization", "packing", "compare", "cli", "errors", "config")


def _imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "megapack":
                names = [f"megapack.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("megapack.")}
    return rooms


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files, f"room {room} has no files: the test would pass vacuously"
    for path in files:
        above = _imported_rooms(path) - MAY_IMPORT[room] - {room} - GROUND
        assert not above, f"{path} imports {sorted(above)}, which {room} may not stand on"


def test_every_room_of_the_package_is_listed() -> None:
    rooms = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(MAY_IMPORT)


def test_building_data_never_imports_torch_or_deepspeed() -> None:
    modules = []
    for name in TORCH_FREE:
        room = PACKAGE / name
        paths = sorted(room.rglob("*.py")) if room.is_dir() else [room.with_suffix(".py")]
        for path in paths:
            dotted = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            modules.append(dotted.removesuffix(".__init__"))
    assert len(modules) > len(TORCH_FREE)
    program = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'deepspeed'):\n"
        "            raise ImportError('refused: ' + name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import importlib\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
