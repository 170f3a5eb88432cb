# `make help` lists the targets: each has its line behind ##. All create their environment by
# themselves; PYTHON chooses the interpreter (3.10 to 3.13), JOBS the test processes.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 3
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --durations=20
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Bytecode is written when a module is imported first, and pip would write that of all others, too.
INSTALL := $(PIP) --no-compile -c constraints.txt
# Commands of the virtual environment first, whatever the shell has on its PATH.
export PATH := $(abspath $(BIN)):$(PATH)
# Images often say that none is written; hundreds of processes of the tests would compile anew.
export PYTHONDONTWRITEBYTECODE :=
# The extension is compiled while pip fetches what tests need; types are checked beside the tests.
MAKEFLAGS += --jobs=2

.DEFAULT_GOAL := help
.PHONY: help venv build demo docs test test-all test-data test-hosts test-cluster test-clouds wheel
.PHONY: lint style types format pytest mutants gpu faults fuzz clean

help: ## this list of targets
	@sed -n 's/^\([a-z%-]*\):.*## \(.*\)/make \1|\2/p' Makefile | sed 's/%/NAME/' | \
	    awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

# torch first and alone (constraints.txt: the CPU build), then deepspeed, whose setup.py imports it.
$(VENV)/.train: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=24" wheel ninja "setuptools>=77" "pybind11>=3"
	$(INSTALL) torch numpy
	DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation deepspeed
	MEGAPACK_NO_EXTENSION=1 $(INSTALL) --no-build-isolation -e '.[train,plot,gigatoken]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	MEGAPACK_NO_EXTENSION=1 $(INSTALL) --no-build-isolation -e '.[dev]'
	touch $@

venv: $(VENV)/.dev ## the environment of the tests, in .venv

build: $(VENV)/.train ## the C++ extension, in place: the files that changed
	MEGAPACK_WERROR=1 $(BIN)/python setup.py --quiet build_ext --inplace

demo: build ## documents -> trained model, on a laptop -> demo/demo.png
	bash launch/demo.sh

test: types pytest ## the gate: format, lint, types, and every test of the product

lint: style types ## format, lint and types, without tests

style: $(VENV)/.dev ## format and lint alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/bindings/* csrc/core/*/* tests/*/*.cpp

types: build $(VENV)/.dev ## types alone (mypy)
	$(BIN)/mypy

format: $(VENV)/.dev ## repair formatting
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/bindings/* csrc/core/*/* tests/*/*.cpp

# Collecting once compiles tests and what they import: else every test process would do it anew.
$(VENV)/.bytecode: $(VENV)/.dev | build
	$(BIN)/python -m pytest -qq --collect-only > /dev/null || true
	touch $@

pytest: build style $(VENV)/.bytecode ## the gate without types
	$(PYTEST) -m "not pages"

test-all: types build style $(VENV)/.bytecode ## the gate, and the tests of documents, papers and results
	$(PYTEST)

$(VENV)/.docs: $(VENV)/.train
	MEGAPACK_NO_EXTENSION=1 $(INSTALL) --no-build-isolation -e '.[docs]'
	touch $@

docs: build $(VENV)/.docs ## the site: pages, API, commands, configuration -> build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo build/site/index.html

mutants: build $(VENV)/.dev ## faults that the tests must notice, one at a time; ONLY=name,...
	ONLY=$(ONLY) JOBS=$(JOBS) $(BIN)/python tests/mutants.py

test-data: ## what builds data, without torch; PYTHON=python3.13
	PYTHON=$(PYTHON) JOBS=$(JOBS) bash tests/data_only.sh

wheel: ## dist/megapack-*.whl for machines without a compiler, and a proof that it works
	PYTHON=$(PYTHON) bash tests/wheel.sh

# Trainers of others, daemons, compilers of kernels: more time than a test of `make test` has.
test-hosts test-cluster test-clouds gpu: export PYTEST_TIMEOUT = 3600

# Hosts that are on no package index: MEGATRON_LM=/path/to/checkout[:/another] make test-hosts, and so
# GPT_NEOX, MEGATRON_DEEPSPEED, MEGATRON_BRIDGE, TORCHTITAN, OLMO_CORE, NANOTRON; AXOLOTL and
# MEGAPACK_VERL name folders as PATH does (their tests say which).
HOSTS := hosts hosts-neox hosts-mds hosts-torchtitan hosts-olmo-core hosts-nanotron

test-hosts: build $(VENV)/.dev $(HOSTS:%=$(VENV)/%) ## trainers of no package index; MEGATRON_LM=/path/to/checkout
	$(BIN)/python -m pytest -q -W ignore tests/hosts

# What starts daemons: launch/slurm.sh on a Slurm of one node, and two nodes that DeepSpeed reaches by
# ssh, of which one is lost. Root, and Debian's slurmctld, slurmd, slurm-client, munge,
# openssh-server, pdsh and iproute2. And launch/kubernetes.yaml against the schemas of Kubernetes.
test-cluster: build $(VENV)/.dev $(VENV)/kubernetes ## Slurm and two nodes, as daemons on this machine; root
	CLUSTER=1 PYTHONPATH=$(VENV)/kubernetes $(BIN)/python -m pytest -v -W ignore \
	    tests/training/test_slurm.py tests/training/test_two_nodes.py tests/training/test_kubernetes.py

# Folders of packages beside those of the environment. Of a host: what it imports and does not use
# here (triton's kernels), or what its own loaders need.
of-hosts := --no-deps triton
of-hosts-neox := --no-deps setuptools==75.8.0 # for pkg_resources
of-hosts-mds := --no-deps --no-build-isolation deepspeed==0.19.0 # for deepspeed.compression
of-hosts-torchtitan := --no-deps triton spmd_types==0.2.3 tyro docstring_parser shtab typeguard \
    grain==0.2.18 etils array_record cloudpickle absl-py portpicker psutil torch_checkpointing
# cached_path imports Google's clients.
of-hosts-olmo-core := --no-deps bettermap cached_path dataclass-extensions importlib-resources \
    google-api-core google-auth google-cloud-core google-cloud-storage google-resumable-media \
    google-crc32c googleapis-common-protos
of-hosts-nanotron := --no-deps dacite triton
of-kubernetes := kubernetes-validate # 100 MB of schemas

# A folder has its name when all of it is there.
$(VENV)/kubernetes $(HOSTS:%=$(VENV)/%): $(VENV)/%: | $(VENV)/.dev
	rm -rf $@.part
	DS_BUILD_OPS=0 $(PIP) --target $@.part $(of-$*)
	mv $@.part $@

# What `make test` skips of the stores: az://, on Azurite, Microsoft's emulator. Node.js and npm.
AZURITE := $(VENV)/azurite/node_modules/.bin/azurite-blob

test-clouds: build $(VENV)/.dev $(AZURITE) ## az://, on Microsoft's emulator; Node.js
	AZURITE=$(AZURITE) $(BIN)/python -m pytest -q tests/remote

$(AZURITE):
	npm install --no-audit --no-fund --prefix $(VENV)/azurite azurite@3

bench-%: build $(VENV)/.dev ## a benchmark: packing, build, merge, data, ...; QUICK=1 is a minute
	$(BIN)/python benchmarks/$*.py

faults: bench-faults bench-edits ## a fault at a time, in real processes; root for two of them

bench-papers: build $(VENV)/.dev ## what the papers claim, trained again; ONLY=atom_size,... SCALE=gpu
	$(BIN)/python benchmarks/papers/all.py

gpu: build $(VENV)/.dev ## what needs a CUDA device; OUT=, PARTS=
	PYTHON=$(BIN)/python bash benchmarks/gpu.sh

fuzz: build $(VENV)/.dev ## every reader, FUZZ_SECONDS in all
	$(BIN)/python tests/fuzz/run.py

clean: ## remove what was compiled and cached
	rm -rf build megapack/_core.* *.egg-info .mypy_cache .ruff_cache .pytest_cache
