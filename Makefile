# Everything runs in a virtual environment of the project's own, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test lint bench experiments clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

# Compress the built-in ViT, print accuracy and speed before and after, write a picture of what each block keeps.
demo: setup
	$(BIN)/pmvit demo -o demo-output

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two files at a time, each on one thread: most tests wait for small models and for processes to start.
test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

# Ratios measured side by side in one run; not part of the tests.
bench: setup
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.deployment

# Every table and figure of the paper, on what PMVIT_DATA names; measures only what is missing. Options: ARGS="--data ...".
experiments: setup
	$(BIN)/python -m experiments $(ARGS)

clean:
	rm -rf $(VENV) demo-output dist .mypy_cache .ruff_cache .pytest_cache
