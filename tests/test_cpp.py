"""The core without Python: tests/cpp/test_*.cpp under the sanitizers.

All under AddressSanitizer and UBSan, those that start threads under ThreadSanitizer, too; both with
libstdc++'s assertions. Every source is compiled once per set, two at a time.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "csrc" / "core"
PROGRAMS = sorted((ROOT / "tests" / "cpp").glob("test_*.cpp"))
THREADED = [
    path for path in PROGRAMS if path.stem in ("test_blocks", "test_strategies", "test_parallel")
]
THREADED_CORE = ("base", "packing", "index")  # the folders they need
# Parts of a few documents: small inputs then have many parts, and threads something to do.
FLAGS = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Werror"]
FLAGS += ["-pthread", "-D_GLIBCXX_ASSERTIONS", "-DMEGAPACK_PART_SIZE=32", f"-I{ROOT / 'csrc'}"]
# Compiling takes longer than running: the optimizer would spend minutes on instrumented code.
SANITIZERS = {
    "address": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}


def compiler() -> str:
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def compile_all(sources: list[Path], out: Path, flags: list[str]) -> list[str]:
    """Object files of the sources, warnings being errors."""

    def compile_one(source: Path) -> str:
        target = out / f"{source.parent.name}_{source.stem}.o"
        command = [compiler(), *FLAGS, *flags, "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"{source.name} does not compile cleanly:\n{done.stderr}"
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


# One test for each sanitizer: test processes that share its programs would each compile the core.
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_core_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    flags = SANITIZERS[sanitizer]
    chosen, sources = PROGRAMS, sorted(CORE.glob("*/*.cpp"))
    if sanitizer == "thread":
        chosen, sources = THREADED, [s for s in sources if s.parent.name in THREADED_CORE]
    assert chosen and sources
    objects = compile_all([*sources, *chosen], tmp_path, flags)
    core = objects[: len(sources)]
    failed = []
    for path, object_file in zip(chosen, objects[len(sources) :], strict=True):
        binary = tmp_path / path.stem
        link = [compiler(), *flags, "-pthread", object_file, *core, "-o", str(binary)]
        subprocess.run(link, check=True)
        done = subprocess.run([binary], check=False, capture_output=True, text=True, cwd=tmp_path)
        if done.returncode != 0:
            failed.append(f"{path.name}:\n{done.stdout}{done.stderr}")
    assert not failed, "\n\n".join(failed)


def test_the_core_knows_nothing_of_python() -> None:
    sources = sorted(CORE.rglob("*.[ch]pp"))
    assert sources
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert "Python.h" not in text and "pybind11" not in text, path


OTHER_MODULE = """
#include <pybind11/pybind11.h>
#include <system_error>
PYBIND11_MODULE(other_module, m) {
    m.def("fail", [] { throw std::system_error(ENOENT, std::generic_category(), "its own"); });
}
"""


def test_exceptions_of_other_extensions_are_left_alone(tmp_path: Path) -> None:
    source = tmp_path / "other_module.cpp"
    source.write_text(OTHER_MODULE)
    include = [pybind11.get_include(), sysconfig.get_paths()["include"]]
    command = [compiler(), "-std=c++17", "-O0", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += [*(f"-I{path}" for path in include), str(source)]
    command += ["-o", str(tmp_path / f"other_module{sysconfig.get_config_var('EXT_SUFFIX')}")]
    subprocess.run(command, check=True)
    program = (
        "import megapack._core, other_module\n"
        "try:\n"
        "    other_module.fail()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""},
    )
    assert done.stdout.strip() == "RuntimeError"
