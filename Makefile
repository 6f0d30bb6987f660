# make demo    set up, then train a language model with autopar and with torch DDP, and compare them
# make test    set up, then run the tests (those that need root say so and are skipped without it)
# make test-all    the tests that take long as well, and more numbers of ranks; not part of CI
# make test-oldest   the tests with the oldest versions that are supported, in .venv-oldest; not part of CI
# make check   set up, then ruff, mypy and the architecture tests
# make venv    only set up;  make clean  removes what the above have made
#
# PYTHON is the interpreter to build on (3.11 or later), VENV where to build, PIP_FLAGS what pip needs to know here,
# DEMO_FLAGS what to tell the demo (`make demo DEMO_FLAGS="--rate '200 Mbit/s'"`).

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
DEMO_FLAGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := .venv-oldest
TESTS := -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# One thread each, as ranks and test processes share the cores; models are built from their configurations.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = true
# Where Python is told to keep no compiled files, each of the tests' processes would compile autopar again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-oldest check format venv clean

demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo $(DEMO_FLAGS)

test: $(STAMP)
	$(BIN)/python $(TESTS) $(PYTEST_FLAGS)

test-all: $(STAMP)
	AUTOPAR_TESTS=all $(BIN)/python $(TESTS) $(PYTEST_FLAGS)

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python $(TESTS) $(PYTEST_FLAGS)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "autopar needs Python 3.11 or later, $(PYTHON) is $$($(PYTHON) -V 2>&1): say 'make PYTHON=python3.11 ...'"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable ".[dev]"
	@touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet $(PIP_FLAGS) --constraint constraints-oldest.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) out build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -exec rm -rf {} +
