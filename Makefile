# Developer commands. Each target does its own set-up, so a fresh clone needs no other command.
# With another interpreter:  make test PYTHON=python3.13 VENV=.venv313
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
WORKERS ?= 2
BENCH_ARGS ?=
SEEDS ?= 0:1000
NODES ?= 5..50
MINUTES ?= 20
SOAK_ARGS ?=
COUNT ?= 500
KILL_ARGS ?=
LOCK_ARGS ?=

export PYTHON VENV
# The tests start thousands of Python processes: without cached bytecode each of them would compile all modules.
unexport PYTHONDONTWRITEBYTECODE
bin := $(VENV)/bin
torch_venv := $(if $(filter .venv,$(VENV)),.venv-torch,$(VENV))
has_native := $(bin)/python -c 'import nexar_native.quic' 2>/dev/null

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-rust test-cuda test-torch lint types format bench bench-peers fuzz simulate soak kill-schedules wheels docs lock audit clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## make the virtual environment; build nexar-native if cargo is installed
	@setup/all.sh

demo: setup ## run examples: four ranks, the loss of one, a joining rank, and each transport
	@$(bin)/nexar run -n 4 examples/first_cluster.py
	@echo
	@$(bin)/nexar run -n 4 examples/first_all_reduce.py
	@echo
	@$(bin)/nexar run -n 4 --on-failure continue examples/survive_a_crash.py
	@echo
	@$(bin)/python examples/grow_while_running.py
	@echo
	@$(bin)/python examples/transports.py

# The tests run in WORKERS processes; one that has run out of tests takes some of another's.
define pytest
	@paths=tests; \
	if [ -d native/tests ]; then \
		if $(has_native); then paths="$$paths native/tests"; \
		else echo "native/tests not run: nexar_native cannot be imported (see the notice of make setup)"; fi; fi; \
	set -x; $(bin)/python -m pytest $$paths --numprocesses $(WORKERS) --dist worksteal
endef

test: setup ## run the tests that are not marked full; WORKERS=0: in one process, for a debugger
	$(pytest) -m "not full" $(PYTEST_ARGS)

test-full: setup ## run every test
	$(pytest) $(PYTEST_ARGS)

test-rust: setup ## run the Rust tests of native/, with the Python of the environment
	@if cargo --version >/dev/null 2>&1 && [ -f native/Cargo.toml ]; then set -x; PYO3_PYTHON=$(abspath $(bin)/python) cargo test --quiet --locked --no-default-features --manifest-path native/Cargo.toml; \
	else echo "Rust not tested: no cargo on PATH, or no crate"; fi

test-cuda: ## run the device tests on a GPU; PYTHON must have torch and nexar's dependencies
	PYTHONPATH=src:tools:$$PYTHONPATH $(PYTHON) -m pytest tests/devices tests/unit/arrays/test_devices.py $(PYTEST_ARGS)

test-torch: ## run the torch backend's tests in .venv-torch (fetches 1 GB); other versions: TORCH=2.13.0 VENV=.venv-torch-2.13
	@VENV=$(torch_venv) setup/torch_environment.sh
	$(torch_venv)/bin/python -m pytest tests/torch $(PYTEST_ARGS)

lint: setup ## check format, lint rules, import rules, package licences and sources; Rust too if cargo is installed
	@setup/lint.sh

types: setup ## run mypy --strict on src and tools
	$(bin)/mypy

format: setup ## format the sources
	$(bin)/ruff format .
	$(bin)/ruff check --fix-only --quiet .
	@if command -v cargo >/dev/null && [ -f native/Cargo.toml ]; then cargo fmt --manifest-path native/Cargo.toml; fi

bench: setup ## measure the transports
	@$(bin)/python benchmarks/transport.py $(BENCH_ARGS)

bench-peers: ## install Gloo, Open MPI and MPICH for nexar bench --against, in .venv-peers (2 GB)
	@setup/bench_peers.sh

fuzz: setup ## fuzz with hostile input, without a time limit
	$(bin)/python -m pytest tests/hostile --hypothesis-profile=fuzz --timeout=0 $(PYTEST_ARGS)

simulate: setup ## simulate clusters in virtual time, on all cores: SEEDS=0:20000 NODES=5..50; prints the violated laws
	@$(bin)/python -m nexar.testing.simulator --seeds $(SEEDS) --nodes $(NODES)

soak: setup ## soak test: processes join and are killed, packets are lost, hosts are cut off: MINUTES=20; SOAK_ARGS="--seed 7"
	@$(bin)/python -m nexar_tools.soak --minutes $(MINUTES) $(SOAK_ARGS)

kill-schedules: setup ## kill ranks in random programs: COUNT=500; KILL_ARGS="--seed 7" repeats a run
	@$(bin)/python -m nexar_tools.kill_schedules --count $(COUNT) $(KILL_ARGS)

docs: ## build the documentation site into site/, with strict checks; tools are in .venv-docs
	@setup/docs.sh

# Compiled code names its source files in panics; remapping removes the paths of this machine.
cargo_sources := $(or $(CARGO_HOME),$(HOME)/.cargo)/registry/src
remapped := --remap-path-prefix=$(cargo_sources)=crates --remap-path-prefix=$(CURDIR)=.
wheels: setup ## build the wheels of both packages into dist/, each with its SBOM, without paths of this machine
	$(bin)/python -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@if command -v cargo >/dev/null; then set -x; PATH="$(abspath $(bin)):$$PATH" RUSTFLAGS="$(remapped) $$RUSTFLAGS" $(bin)/python -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist ./native; \
	else echo "nexar-native not built: no cargo on PATH"; fi
	$(bin)/python setup/wheels.py dist/*.whl

lock: ## write setup/requirements/*.txt; LOCK_ARGS=--upgrade takes the newest versions
	@setup/lock.sh $(LOCK_ARGS)

audit: ## report known vulnerabilities of locked packages; queries advisory databases
	@setup/audit.sh

clean: ## remove everything the other targets made
	rm -rf $(VENV) $(torch_venv) .venv-peers .venv-docs .venv-lock .venv-audit site dist build native/target .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tools tests native -name __pycache__ -type d -prune -exec rm -rf {} +
