# `make help` lists the targets; the text after ## describes each. Targets create the environment that
# they need. PYTHON chooses the interpreter (3.10 to 3.13), JOBS the number of test processes.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 3
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --durations=20
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Without --no-compile, pip would compile the bytecode of all modules, also of those never imported.
INSTALL := $(PIP) --no-compile -c constraints.txt
# Commands of the virtual environment come first.
export PATH := $(abspath $(BIN)):$(PATH)
# Images often set this variable; hundreds of test processes would then compile all modules again.
export PYTHONDONTWRITEBYTECODE :=
# Compile the extension while pip downloads test packages; check types while tests run.
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

build: $(VENV)/.train ## compile changed files of the C++ extension, in place
	MEGAPACK_WERROR=1 $(BIN)/python setup.py --quiet build_ext --inplace

demo: build ## documents -> trained model, on a laptop -> demo/demo.png
	bash launch/demo.sh

test: types pytest ## format, lint, types, and every test of the product; must pass before a merge

lint: style types ## format, lint and types, without tests

style: $(VENV)/.dev ## only format and lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/bindings/*.?pp csrc/core/*/*.?pp tests/*/*.?pp

types: build $(VENV)/.dev ## only types (mypy)
	$(BIN)/mypy

format: $(VENV)/.dev ## repair formatting
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/bindings/*.?pp csrc/core/*/*.?pp tests/*/*.?pp

# Collect tests once, which compiles them; otherwise every test process compiles them again.
$(VENV)/.bytecode: $(VENV)/.dev | build
	$(BIN)/python -m pytest -qq --collect-only > /dev/null || true
	touch $@

pytest: build style $(VENV)/.bytecode ## make test without types
	$(PYTEST) -m "not pages"

test-all: types build style $(VENV)/.bytecode ## make test, and the tests of pages, papers and results
	$(PYTEST)

$(VENV)/.docs: $(VENV)/.train
	MEGAPACK_NO_EXTENSION=1 $(INSTALL) --no-build-isolation -e '.[docs]'
	touch $@

docs: build $(VENV)/.docs ## the site: pages, API, commands, configuration -> build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo build/site/index.html

mutants: build $(VENV)/.dev ## check that the tests detect faults, one at a time; ONLY=name,...
	ONLY=$(ONLY) JOBS=$(JOBS) $(BIN)/python tests/mutants.py

test-data: ## tests of data building without torch; PYTHON=python3.13
	PYTHON=$(PYTHON) JOBS=$(JOBS) bash tests/data_only.sh

wheel: ## dist/megapack-*.whl for machines without a compiler, and a test of it
	PYTHON=$(PYTHON) bash tests/wheel.sh

# Other trainers, daemons and kernel compilers need a longer timeout.
test-hosts test-cluster test-clouds gpu: export PYTEST_TIMEOUT = 3600

# Hosts without a package: MEGATRON_LM=/path/to/checkout[:/another] make test-hosts, likewise GPT_NEOX,
# MEGATRON_DEEPSPEED, MEGATRON_BRIDGE, TORCHTITAN, OLMO_CORE, NANOTRON, NANOCHAT; AXOLOTL and
# MEGAPACK_VERL name folders as PATH does (their tests say which).
HOSTS := hosts hosts-neox hosts-mds hosts-torchtitan hosts-olmo-core hosts-nanotron \
    hosts-nanochat

test-hosts: build $(VENV)/.dev $(HOSTS:%=$(VENV)/%) ## trainers from checkouts; MEGATRON_LM=/path/to/checkout
	$(BIN)/python -m pytest -q -W ignore tests/hosts

# Tests with daemons: launch/slurm.sh on a Slurm of one node; DeepSpeed over ssh on two nodes, one of
# which is lost. They need root, and Debian's slurmctld, slurmd, slurm-client, munge, openssh-server,
# pdsh and iproute2. Also validates launch/kubernetes.yaml against the schemas of Kubernetes.
test-cluster: build $(VENV)/.dev $(VENV)/kubernetes ## Slurm and two nodes, as daemons on this machine; root
	CLUSTER=1 PYTHONPATH=$(VENV)/kubernetes $(BIN)/python -m pytest -v -W ignore \
	    tests/training/test_slurm.py tests/training/test_two_nodes.py tests/training/test_kubernetes.py

# Additional packages per host, each in its own folder: packages that the host imports without using
# them here (triton), or that its own loaders need.
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
of-hosts-nanochat := rustbpe tiktoken wandb
of-kubernetes := kubernetes-validate # 100 MB of schemas

# Rename the folder when it is complete.
$(VENV)/kubernetes $(HOSTS:%=$(VENV)/%): $(VENV)/%: | $(VENV)/.dev
	rm -rf $@.part
	DS_BUILD_OPS=0 $(PIP) --target $@.part $(of-$*)
	mv $@.part $@

# `make test` skips az://, which needs Azurite, Microsoft's emulator, with Node.js and npm.
AZURITE := $(VENV)/azurite/node_modules/.bin/azurite-blob

test-clouds: build $(VENV)/.dev $(AZURITE) ## az:// on Microsoft's emulator; needs Node.js
	AZURITE=$(AZURITE) $(BIN)/python -m pytest -q tests/remote

$(AZURITE):
	npm install --no-audit --no-fund --prefix $(VENV)/azurite azurite@3

bench-%: build $(VENV)/.dev ## a benchmark: packing, build, merge, data, ...; QUICK=1 is a minute
	$(BIN)/python benchmarks/$*.py

faults: bench-faults bench-edits ## inject one fault at a time into real processes; two need root

bench-papers: build $(VENV)/.dev ## train models for the papers' claims; ONLY=atom_size,... SCALE=gpu
	$(BIN)/python benchmarks/papers/all.py

gpu: build $(VENV)/.dev ## everything that needs a CUDA device; OUT=, PARTS=
	PYTHON=$(BIN)/python bash benchmarks/gpu.sh

fuzz: build $(VENV)/.dev ## fuzz every reader, FUZZ_SECONDS in total
	$(BIN)/python tests/fuzz/run.py

clean: ## remove compiled and cached files
	rm -rf build megapack/_core.* *.egg-info .mypy_cache .ruff_cache .pytest_cache
