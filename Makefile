# Each target first sets up a virtual environment with what it needs, once for each change of setup.py.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Test processes: each compiles on one core.
JOBS ?= 2
CODE := glm5_jax pallas_kernels launch experiments envs tests setup.py

.PHONY: help quickstart test slow-test lint format bench compile-table compile-turn golden clean
help:
	@echo "make quickstart   train a small GLM-5 on this machine's own text, evaluate and sample it"
	@echo "make test         fast tests        make slow-test   the rest"
	@echo "make lint         style, types, import contract        make format   apply the style"
	@echo "make bench        speed beside transformers, one table"
	@echo "make compile-table  the 744B programs compiled for TPU slices, without a TPU; goes on where it stopped"
	@echo "make golden       rewrite the resolved configs that tests compare with"
	@echo "make clean        remove the environment, caches and builds (runs/ stays)"

quickstart: $(VENV)/.core
	$(BIN)/python -m launch.quickstart

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow"

slow-test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(VENV)/.bench
	-$(BIN)/python -m experiments.benchmarks.maxtext_peer --install
	$(BIN)/python -m experiments.benchmarks.table

compile-table: $(VENV)/.dev
	$(BIN)/python -m experiments.benchmarks.compile_table

# One of them, another after every commit.
compile-turn: $(VENV)/.dev
	$(BIN)/python -m experiments.benchmarks.compile_table --turn $$(git rev-list --count HEAD)

golden: $(VENV)/.dev
	$(BIN)/python -m tests.test_layout

clean:
	rm -rf $(VENV) .venv-maxtext .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf build dist *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, for example: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: setup.py | $(BIN)/python
	@echo "Installing into $(VENV) ($*), a minute or two …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.$(if $(filter core,$*),,[$*])'
	@touch $@ $(VENV)/.core
