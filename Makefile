# make demo   documents -> trained model, in a few minutes on a laptop
# make test   the gate: format, lint, types, and every test of the product
# make test-all   and the tests of documents, papers and results
# make mutants   faults that the tests must notice, one at a time; ONLY=name,... JOBS=2
# make test-data PYTHON=python3.13   what builds data, on another Python, without torch
# All create their environment by themselves; PYTHON chooses the interpreter (>= 3.10), JOBS the test
# processes.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Commands of the virtual environment first, whatever the shell has on its PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help venv build demo test test-all test-data test-hosts test-cluster test-clouds wheel lint
.PHONY: format pytest mutants gpu faults fuzz clean

help:
	@sed -n 's/^# make/make/p' Makefile

# torch first and alone (constraints.txt: the CPU build), then deepspeed, whose setup.py imports it.
$(VENV)/.train: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=24" wheel ninja "setuptools>=77" "pybind11>=2.12"
	$(PIP) -c constraints.txt torch numpy
	DS_BUILD_OPS=0 $(PIP) -c constraints.txt --no-build-isolation deepspeed
	MEGAPACK_NO_EXTENSION=1 $(PIP) -c constraints.txt --no-build-isolation -e '.[train,plot,gigatoken]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	MEGAPACK_NO_EXTENSION=1 $(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

venv: $(VENV)/.dev

# Only what changed is compiled again; MEGAPACK_WERROR makes a warning an error.
build: $(VENV)/.train
	MEGAPACK_WERROR=1 $(BIN)/python setup.py --quiet build_ext --inplace

demo: build
	bash launch/demo.sh

test: lint pytest

lint: build $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/bindings/* csrc/core/*/* tests/*/*.cpp
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/bindings/* csrc/core/*/* tests/*/*.cpp

PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --durations=20

pytest: build $(VENV)/.dev
	$(PYTEST) -m "not pages"

test-all: lint
	$(PYTEST)

# Each in a copy of the tree, by the tests of its module; not less often than before a release.
mutants: build $(VENV)/.dev
	ONLY=$(ONLY) JOBS=$(JOBS) $(BIN)/python tests/mutants.py

test-data:
	PYTHON=$(PYTHON) JOBS=$(JOBS) bash tests/data_only.sh

# dist/megapack-*manylinux*.whl for machines without a compiler, tried in a fresh environment.
wheel:
	PYTHON=$(PYTHON) bash tests/wheel.sh

# Trainers of others, daemons, compilers of kernels: more time than a test of `make test` has.
test-hosts test-cluster test-clouds gpu: export PYTEST_TIMEOUT = 3600

# Hosts that are on no package index: MEGATRON_LM=/path/to/checkout[:/another] make test-hosts, and so
# GPT_NEOX, MEGATRON_DEEPSPEED, TORCHTITAN. What a host alone imports has a folder of its own.
test-hosts: build $(VENV)/.dev $(VENV)/hosts $(VENV)/hosts-neox $(VENV)/hosts-mds $(VENV)/hosts-torchtitan
	$(BIN)/python -m pytest -q -W ignore tests/hosts

# What starts daemons: launch/slurm.sh on a Slurm of one node, and two nodes that DeepSpeed reaches by
# ssh, of which one is lost. Root, and Debian's slurmctld, slurmd, slurm-client, munge,
# openssh-server, pdsh and iproute2.
test-cluster: build $(VENV)/.dev
	CLUSTER=1 $(BIN)/python -m pytest -v -W ignore tests/training/test_slurm.py \
	    tests/training/test_two_nodes.py

# What `make test` skips of the stores: az://, on Azurite, Microsoft's emulator. Node.js and npm.
AZURITE := $(VENV)/azurite/node_modules/.bin/azurite-blob

test-clouds: build $(VENV)/.dev $(AZURITE)
	AZURITE=$(AZURITE) $(BIN)/python -m pytest -q tests/remote

$(AZURITE):
	npm install --no-audit --no-fund --prefix $(VENV)/azurite azurite@3

# Megatron-LM imports triton, whose kernels are not called on a CPU.
$(VENV)/hosts: $(VENV)/.dev
	$(PIP) --no-deps --target $@ triton

# torchtitan imports triton and what its own loaders need; not its torch, nor datasets, which is here.
$(VENV)/hosts-torchtitan: $(VENV)/.dev
	$(PIP) --no-deps --target $@ triton spmd_types==0.2.3 tyro docstring_parser shtab typeguard \
	    grain==0.2.18 etils array_record cloudpickle absl-py portpicker psutil torch_checkpointing

# GPT-NeoX imports pkg_resources.
$(VENV)/hosts-neox: $(VENV)/.dev
	$(PIP) --no-deps --target $@ setuptools==75.8.0

# Megatron-DeepSpeed imports deepspeed.compression.
$(VENV)/hosts-mds: $(VENV)/.dev
	DS_BUILD_OPS=0 $(PIP) --no-deps --no-build-isolation --target $@ deepspeed==0.19.0

# make bench-packing, bench-build, bench-merge, bench-data, bench-schedule, bench-train, ...; QUICK=1
# takes less than a minute, and the table comes last.
bench-%: build $(VENV)/.dev
	$(BIN)/python benchmarks/$*.py

# A fault at a time, in real processes, beside a plain DeepSpeed loop; root for two of them.
faults: bench-faults

# What the papers claim, trained again: within 40 minutes; ONLY=atom_size,... chooses, SCALE=gpu.
bench-papers: build $(VENV)/.dev
	$(BIN)/python benchmarks/papers/all.py

# The day a GPU is at hand: the gpu tests, bench-train and the papers' recipes on it. OUT, PARTS.
gpu: build $(VENV)/.dev
	PYTHON=$(BIN)/python bash benchmarks/gpu.sh

# Every reader, for FUZZ_SECONDS in all (default 60); what fails is kept in tests/fuzz/corpus.
fuzz: build $(VENV)/.dev
	$(BIN)/python tests/fuzz/run.py

clean:
	rm -rf build megapack/_core*.so *.egg-info .mypy_cache .ruff_cache .pytest_cache
