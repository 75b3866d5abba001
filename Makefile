# Everything runs in a virtual environment of the project's own, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BROWSER ?= yes

.PHONY: setup newest browser demo test pytest lint docs bench experiments wheel clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

# The newest releases of what pmvit compresses models of, in place of those it is tested with; `make clean` goes back.
newest: setup
	$(BIN)/python -m pip install --quiet --upgrade torch torchvision timm transformers
	$(BIN)/python -m pip list | grep --extended-regexp '^(torch|torchvision|timm|transformers) '

# The pages are tested in Chromium: installed once where that may be done, unless BROWSER=no; else those tests are skipped.
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
	[ "$(BROWSER)" != no ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	&& echo "installing Chromium with apt-get, to test the pages in; make test BROWSER=no goes without" \
	&& apt-get update -qq >/dev/null 2>&1 && apt-get install -qq --yes chromium >/dev/null 2>&1; } \
	|| echo "no Chromium: the tests of the pages are skipped"

# Compress the built-in ViT, print accuracy and speed before and after, write a report to open in a browser.
demo: setup
	$(BIN)/pmvit demo -o demo-output

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint pytest

# Two files at a time, each on one thread: most tests wait for small models and for processes to start.
pytest: setup browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

# The documentation, as a site in site/ that needs no network; a broken link or an undocumented parameter is an error.
docs: setup
	$(BIN)/python -m scripts.results
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html; for search, serve it: python3 -m http.server --directory site"

# Ratios measured side by side in one run; not part of the tests.
bench: setup
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.deployment

# Build wheel and sdist into dist/ and try them in an empty environment: some minutes, and downloads.
wheel: setup
	$(BIN)/python -m scripts.check_wheel

# Every table and figure of the paper, on what PMVIT_DATA names; measures only what is missing. Options: ARGS="--data ...".
experiments: setup
	$(BIN)/python -m experiments $(ARGS)

clean:
	rm -rf $(VENV) demo-output dist site .mypy_cache .ruff_cache .pytest_cache
