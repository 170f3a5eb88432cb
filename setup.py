"""Build the C++ extension and its type stub; pyproject.toml holds all other package metadata."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

# Sorted: the binary must not depend on the order in which a file system lists files.
SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cpp"))

# No -march=native: a wheel built on one node of a cluster must run on the others.
COMPILE_ARGS = ["-O3", "-Wall", "-Wextra", "-Wconversion", "-fvisibility=hidden", "-pthread"]
# Sizes and positions are signed throughout; clang would warn where one indexes a vector.
COMPILE_ARGS.append("-Wno-sign-conversion")
if os.environ.get("MEGAPACK_WERROR") == "1":
    COMPILE_ARGS.append("-Werror")


def is_outdated(object_file: Path, flags: Path) -> bool:
    """Return True if a source or header of the object, or the flags, changed after it was compiled.

    The compiler lists the files that it read next to the object (-MMD), as a rule of make:
    ``a.o: a.cpp b.hpp \\<newline> c.hpp``, spaces in names escaped.
    """
    rule = object_file.with_suffix(".d")
    if not rule.exists():
        return True
    names = re.split(r"(?<!\\)\s+", rule.read_text().replace("\\\n", " ").strip())[1:]
    files = [flags, *(Path(name.replace("\\ ", " ")) for name in names)]
    compiled = object_file.stat().st_mtime_ns
    return any(not file.exists() or file.stat().st_mtime_ns >= compiled for file in files)


class BuildOutdated(build_ext):
    """Compile the outdated objects in parallel, link them, write megapack/_core.pyi."""

    def run(self) -> None:
        super().run()
        for ext in self.extensions:
            # In a new process: Python cannot load a module of this name twice.
            compiled = self.get_ext_fullpath(ext.name)
            subprocess.run([sys.executable, "csrc/bindings/stubs.py", compiled], check=True)

    def build_extension(self, ext: Pybind11Extension) -> None:
        flags = Path(self.build_temp) / "flags"
        command = " ".join([*self.compiler.compiler_so_cxx, *ext.extra_compile_args])
        if not flags.exists() or flags.read_text() != command:
            flags.parent.mkdir(parents=True, exist_ok=True)
            flags.write_text(command)
        # setuptools compiles all objects or none: needs_recompile decides for each of them.
        self.force = True
        with ParallelCompile(
            "MEGAPACK_BUILD_JOBS",
            default=os.cpu_count() or 1,
            needs_recompile=lambda object_file, _: is_outdated(Path(object_file), flags),
        ):
            super().build_extension(ext)


EXTENSION = Pybind11Extension(
    "megapack._core",
    SOURCES,
    include_dirs=["csrc"],
    cxx_std=17,
    extra_compile_args=[*COMPILE_ARGS, "-MMD"],
    extra_link_args=["-pthread"],
)

# The Makefile installs an editable package first and builds the extension in place later.
IN_PLACE = os.environ.get("MEGAPACK_NO_EXTENSION") == "1"

setup(ext_modules=[] if IN_PLACE else [EXTENSION], cmdclass={"build_ext": BuildOutdated})
