"""Builds the C++ extension; everything else about the package stands in pyproject.toml."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

# Sorted, so that the same tree gives the same binary wherever it is built.
SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cpp"))

# No -march=native: a wheel built on one node of a cluster must run on the others.
COMPILE_ARGS = ["-O3", "-Wall", "-Wextra", "-Wconversion", "-fvisibility=hidden", "-pthread"]
# Sizes and positions are signed, also those that index a vector, which clang would warn of.
COMPILE_ARGS.append("-Wno-sign-conversion")
if os.environ.get("MEGAPACK_WERROR") == "1":
    COMPILE_ARGS.append("-Werror")


def is_outdated(object_file: Path, flags: Path) -> bool:
    """Whether something that the object was made from has changed since, or the flags have.

    The compiler wrote what it read beside the object (-MMD), as a rule of make:
    ``a.o: a.cpp b.hpp \\<newline> c.hpp``, spaces in names escaped.
    """
    rule = object_file.with_suffix(".d")
    if not rule.exists():
        return True
    names = re.split(r"(?<!\\)\s+", rule.read_text().replace("\\\n", " ").strip())[1:]
    files = [flags, *(Path(name.replace("\\ ", " ")) for name in names)]
    made = object_file.stat().st_mtime_ns
    return any(not file.exists() or file.stat().st_mtime_ns >= made for file in files)


class BuildOutdated(build_ext):
    """Compiles the objects that are outdated, in parallel, and links if there were any."""

    def build_extension(self, ext: Pybind11Extension) -> None:
        flags = Path(self.build_temp) / "flags"
        told = " ".join([*self.compiler.compiler_so_cxx, *ext.extra_compile_args])
        if not flags.exists() or flags.read_text() != told:
            flags.parent.mkdir(parents=True, exist_ok=True)
            flags.write_text(told)
        self.force = True  # look at every object; setuptools would compile all of them or none
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

# The Makefile installs an editable package first and then builds in place, once.
IN_PLACE = os.environ.get("MEGAPACK_NO_EXTENSION") == "1"

setup(ext_modules=[] if IN_PLACE else [EXTENSION], cmdclass={"build_ext": BuildOutdated})
