"""Builds the C++ extension; everything else about the package stands in pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

# Sorted, so that the same tree gives the same binary wherever it is built.
SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.hpp"))

# No -march=native: a wheel built on one node of a cluster must run on the others.
COMPILE_ARGS = ["-O3", "-Wall", "-Wextra", "-Wconversion", "-fvisibility=hidden", "-pthread"]
# Sizes and positions are signed, also those that index a vector, which clang would warn of.
COMPILE_ARGS.append("-Wno-sign-conversion")
if os.environ.get("MEGAPACK_WERROR") == "1":
    COMPILE_ARGS.append("-Werror")

ParallelCompile("MEGAPACK_BUILD_JOBS", default=os.cpu_count() or 1).install()

EXTENSION = Pybind11Extension(
    "megapack._core",
    SOURCES,
    depends=HEADERS,
    include_dirs=["csrc"],
    cxx_std=17,
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=["-pthread"],
)

# The Makefile installs an editable package first and then builds in place, once.
IN_PLACE = os.environ.get("MEGAPACK_NO_EXTENSION") == "1"

setup(ext_modules=[] if IN_PLACE else [EXTENSION], cmdclass={"build_ext": build_ext})
