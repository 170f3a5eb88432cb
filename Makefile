# make demo   documents -> trained model, in a few minutes on a laptop
# make test   every check this repository has: format, lint, types, tests
# Both create .venv by themselves; PYTHON chooses the interpreter (>= 3.10).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help venv build demo test lint format pytest clean

help:
	@sed -n 's/^# make/make/p' Makefile

# torch first and alone (constraints.txt: the CPU build), then deepspeed, whose setup.py imports torch.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=24" wheel \
	    "setuptools>=77" "pybind11>=2.12"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet -c constraints.txt \
	    --no-build-isolation deepspeed
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

venv: $(STAMP)

# The extension is rebuilt only when a source changed; MEGAPACK_WERROR makes a warning an error.
build: $(STAMP)
	MEGAPACK_WERROR=1 $(BIN)/python setup.py --quiet build_ext --inplace

demo: build
	PATH="$(CURDIR)/$(BIN):$$PATH" bash launch/demo.sh

test: lint pytest

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*/*.[ch]pp tests/cpp/*.cpp
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*/*.[ch]pp tests/cpp/*.cpp

pytest: build
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

clean:
	rm -rf build megapack/_core*.so *.egg-info .mypy_cache .ruff_cache .pytest_cache
