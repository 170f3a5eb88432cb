"""The core without Python: every tests/cpp/test_*.cpp runs under AddressSanitizer and UBSan."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted((ROOT / "tests" / "cpp").glob("test_*.cpp"))
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-pthread"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture(scope="session")
def core_objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Every source of csrc/core, compiled once with the sanitizers on."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    out = tmp_path_factory.mktemp("core")
    running = []
    for source in sorted((ROOT / "csrc" / "core").glob("*.cpp")):
        target = out / f"{source.stem}.o"
        command = [compiler, *FLAGS, *SANITIZERS, "-I", str(ROOT / "csrc"), "-c", str(source)]
        running.append((target, subprocess.Popen([*command, "-o", str(target)])))
    for target, process in running:
        assert process.wait() == 0, f"{target.stem}.cpp does not compile cleanly"
    return [target for target, _ in running]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_core_program(program: Path, core_objects: list[Path], tmp_path: Path) -> None:
    binary = tmp_path / program.stem
    command = ["g++", *FLAGS, *SANITIZERS, "-I", str(ROOT / "csrc"), str(program)]
    subprocess.run([*command, *map(str, core_objects), "-o", str(binary)], check=True)
    done = subprocess.run([str(binary)], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_core_knows_nothing_of_python() -> None:
    sources = sorted((ROOT / "csrc" / "core").glob("*.[ch]pp"))
    assert sources
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert "Python.h" not in text and "pybind11" not in text, path
