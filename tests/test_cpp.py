"""The core without Python: tests/cpp/test_*.cpp under the sanitizers.

All under AddressSanitizer and UBSan, those that start threads under ThreadSanitizer, too; both with
libstdc++'s assertions. Every source is compiled once per set, two at a time, and again when it, a
header that it includes or a flag has changed: the names of objects, kept in build/sanitizers, say
what they were made from.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
import pytest
from programs import PYTHON, ended

ROOT = Path(__file__).parents[1]
CORE = ROOT / "csrc" / "core"
PROGRAMS = sorted((ROOT / "tests" / "cpp").glob("test_*.cpp"))
THREADED = [
    ROOT / "tests" / "cpp" / f"test_{of}.cpp" for of in ("blocks", "strategies", "parallel")
]
THREADED_CORE = ("base", "packing", "index")  # the folders they need
# Small parts, so that small inputs keep several threads busy.
FLAGS = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Werror"]
FLAGS += ["-pthread", "-D_GLIBCXX_ASSERTIONS", "-DMEGAPACK_PART_SIZE=32", f"-I{ROOT / 'csrc'}"]
# Compiling takes longer than running: optimizing instrumented code takes minutes.
SANITIZERS = {
    "address": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}


def compiler() -> str:
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def included(source: Path, found: dict[Path, bytes]) -> dict[Path, bytes]:
    """Return the source and all headers of this repository that it includes, with contents."""
    found[source] = source.read_bytes()
    for name in re.findall(r'^#include "(.+)"', found[source].decode(), re.MULTILINE):
        folders = (source.parent, ROOT / "csrc")
        (header,) = {folder / name for folder in folders if (folder / name).is_file()}
        if header not in found:
            included(header, found)
    return found


def compile_all(sources: list[Path], out: Path, flags: list[str]) -> list[Path]:
    """Compile the sources with warnings as errors; remove objects of other contents."""
    command = [compiler(), *FLAGS, *flags]
    version = ended(compiler(), "--version").stdout

    def compile_one(source: Path) -> Path:
        key = hashlib.sha256(f"{command}{version}".encode())
        for path, text in sorted(included(source, {}).items()):
            key.update(f"{path} {len(text)} ".encode() + text)
        name = f"{source.parent.name}_{source.stem}"
        target = out / f"{name}.{key.hexdigest()[:24]}.o"
        if not target.exists():
            new = target.with_suffix(f".{os.getpid()}.tmp")
            done = ended(*command, "-c", source, "-o", new, status=None)
            assert done.returncode == 0, f"{source.name} does not compile cleanly:\n{done.stderr}"
            for old in out.glob(f"{name}.*.o"):
                old.unlink()
            new.rename(target)
        return target

    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


# One test for each sanitizer: test processes that share its programs would each compile the core.
@pytest.mark.timeout(1800)  # the first time, on a busy machine
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_core_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    flags = SANITIZERS[sanitizer]
    chosen, sources = PROGRAMS, sorted(CORE.glob("*/*.cpp"))
    if sanitizer == "thread":
        chosen, sources = THREADED, [s for s in sources if s.parent.name in THREADED_CORE]
    assert chosen and sources
    objects = compile_all([*sources, *chosen], ROOT / "build" / "sanitizers" / sanitizer, flags)
    core = objects[: len(sources)]
    failed = []
    for path, object_file in zip(chosen, objects[len(sources) :], strict=True):
        binary = tmp_path / path.stem
        link = [compiler(), *flags, "-pthread", object_file, *core, "-o", binary]
        ended(*link)
        done = ended(binary, status=None, cwd=tmp_path)
        if done.returncode != 0:
            failed.append(f"{path.name}:\n{done.stdout}{done.stderr}")
    assert not failed, "\n\n".join(failed)


def test_objects_are_compiled_again_when_what_they_were_made_from_changed(tmp_path: Path) -> None:
    header, first, second = (tmp_path / name for name in ("a.hpp", "a.cpp", "b.cpp"))
    header.write_text("int a();\n")
    first.write_text('#include "a.hpp"\nint a() { return 1; }\n')
    second.write_text("int b();\nint b() { return 2; }\n")

    def compiled(*flags: str) -> set[Path]:
        """Return sources whose objects are new."""
        before = set((tmp_path / "out").glob("*"))
        objects = compile_all([first, second], tmp_path / "out", [*flags])
        assert {*objects} == set((tmp_path / "out").glob("*"))
        pairs = zip((first, second), objects, strict=True)
        return {path for path, made in pairs if made not in before}

    assert compiled() == {first, second}
    assert not compiled()
    header.write_text("int a(void);\n")
    assert compiled() == {first}
    assert compiled("-O1") == {first, second}
    second.write_text("int b() { return 2 + c; }\n")
    with pytest.raises(AssertionError, match=r"b\.cpp does not compile cleanly"):
        compiled()


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


FAILS = """
import megapack._core, other_module
try:
    other_module.fail()
except Exception as error:
    print(type(error).__name__)
"""


def test_exceptions_of_other_extensions_are_left_alone(tmp_path: Path) -> None:
    source = tmp_path / "other_module.cpp"
    source.write_text(OTHER_MODULE)
    include = [pybind11.get_include(), sysconfig.get_paths()["include"]]
    command = [compiler(), "-std=c++17", "-O0", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += [*(f"-I{path}" for path in include), str(source)]
    command += ["-o", str(tmp_path / f"other_module{sysconfig.get_config_var('EXT_SUFFIX')}")]
    ended(*command)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    done = ended(*PYTHON, FAILS, cwd=tmp_path, env=environment)
    assert done.stdout.strip() == "RuntimeError"
