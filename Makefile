# make demo    trains a small streaming recogniser through this library (DATA=morse, or DATA=speech)
# make test    lint, types and the whole test suite
# make clean   removes the environment and caches
#
# Both make their own virtual environment first.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
TORCH ?= torch==2.13.0
# With a GPU the demo runs on it; CuPy finds the CUDA libraries that PyTorch brings.
CUDA = $(if $(shell command -v nvidia-smi),$(shell echo ,cuda13))
DATA ?= morse

.PHONY: demo test lint types unit clean

demo: $(VENV)/.demo
	$(BIN)/python -m flash_rnnt_cupy demo --data $(DATA)

test: lint types unit

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

unit: $(VENV)/.test
	$(BIN)/python -m pytest -q --cov --cov-report=term --cov-fail-under=95

$(VENV)/.base:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip "setuptools>=70.1"
	$(BIN)/python -m pip install -q $(TORCH)
	touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[cli,plot$(CUDA)]"
	touch $@

$(VENV)/.test: $(VENV)/.base pyproject.toml
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[cli,dev,kernels,plot]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
