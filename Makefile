# make test    own virtual environment, then lint, types and the whole test suite
# make clean   removes the environment and caches

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# The CPU build of PyTorch is enough for the tests; any torch >= 2.11 will do.
TORCH ?= torch==2.13.0

.PHONY: test lint types unit clean

test: lint types unit

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

unit: $(VENV)/.ready
	$(BIN)/python -m pytest -q --cov --cov-fail-under=95

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip "setuptools>=70.1"
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
