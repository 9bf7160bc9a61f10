# Two commands do everything on a fresh machine, each by itself: `make demo` and `make test`.
# The first Python that is new enough is taken; name another with PYTHON=...

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
VENV ?= .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
CMAKE = PATH="$(abspath $(BIN)):$$PATH" cmake
PYTEST_ARGS ?=
# OCTAVO_NATIVE=0: no kernels, and no compiler needed
NATIVE := $(if $(filter 0,$(OCTAVO_NATIVE)),,native)

.PHONY: demo test native sanitize cross exactness models lint types layers check format clean

demo: $(VENV)/.installed $(NATIVE) ## set up, bring the default model, run a batch of prompts
	$(BIN)/octavo pull smollm2
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-test $(NATIVE) models ## set up, bring the models of the tests, run every test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

exactness: $(VENV)/.installed-test $(NATIVE) models ## the same tokens, however a request was scheduled
	$(BIN)/python -m pytest tests/exactness $(PYTEST_ARGS)

models: $(VENV)/.installed-test ## without them tests skip, or fail if OCTAVO_REQUIRE_MODELS=1
	$(BIN)/python tests/fetch_models.py || test "$$OCTAVO_REQUIRE_MODELS" != 1

lint: $(VENV)/.installed-dev ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev ## static types of the rooms without torch
	$(BIN)/mypy

layers: $(VENV)/.installed-dev ## who may import whom
	$(BIN)/lint-imports

native: $(VENV)/.build-tools ## build the kernels in place, only what changed
	@# a copy of the checkout brings a build tree that is of no use here
	@test "$$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' build/native/CMakeCache.txt 2>&1)" -ef . || rm -rf build/native
	@$(CMAKE) -S . -B build/native -G Ninja -DPython_EXECUTABLE=$(abspath $(BIN)/python) > /dev/null
	@$(CMAKE) --build build/native
	@$(CMAKE) --install build/native --prefix . > /dev/null

sanitize: $(VENV)/.installed-test $(VENV)/.build-tools ## the tests of the kernels under the compiler's sanitizers (Linux)
	PATH="$(abspath $(BIN)):$$PATH" tests/build/sanitize.sh

cross: $(VENV)/.build-tools ## compile the kernels with clang, for x86-64 and arm64
	PATH="$(abspath $(BIN)):$$PATH" tests/build/cross.sh

check: lint types layers

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build octavo/ops/cpu/_native*.so *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Octavo needs Python 3.11 or newer; name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[$*]'
	@touch $@

$(VENV)/.build-tools: constraints.txt | $(BIN)/python
	$(PIP) cmake ninja nanobind
	@touch $@
