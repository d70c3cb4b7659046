# Everything from a bare clone: Python 3.11 or newer, make and pip are enough.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3.14 python3 python,$(shell command -v $(name) 2>/dev/null)))
VENV   ?= .venv
BIN    := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --ignore=tests/gpu

.PHONY: help setup dev demo test test-full quick lint bench gpu clean

help:
	@echo "make demo       what pre-training is worth, on the bundled images (under 5 minutes)"
	@echo "make test       lint, types and the tests (under 8 minutes on two cores)"
	@echo "make test-full  the same, then the long tests: a browser, networks in full depth, many processes, long faults"
	@echo "make quick      the fast tests (under a minute)"
	@echo "make setup      only the virtual environment with vitrail in it"
	@echo "make bench      speed side by side with timm and transformers"
	@echo "make gpu        the tests that need a CUDA device"

# torch first and alone: with the pinned build in place, nothing later can bring in another.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -d $(VENV) || { echo "making the virtual environment $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing vitrail and its pinned dependencies"
	@$(PIP) torch && $(PIP) --editable '.[hub]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing what the tests need"
	@$(PIP) --editable '.[dev]'
	@touch $@

setup: $(VENV)/.installed
dev: $(VENV)/.installed-dev

demo: setup
	@$(BIN)/vitrail demo

test: lint
	@$(PYTEST) -m "not full"

test-full: test
	@$(PYTEST) -m full

quick: dev
	@$(PYTEST) -m "not slow and not full"

lint: dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	@$(BIN)/mypy --package vitrail --platform win32 --cache-dir .mypy_cache/win32

bench: dev
	@$(BIN)/python -m bench

gpu: dev
	@$(BIN)/python -m pytest tests/gpu

clean:
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
