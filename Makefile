# make run: the main job on real training.  make test: the whole suite.  make lint: style, types, imports.
# Each target makes .venv by itself on a machine that has only Python >= 3.11.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test lint clean

run: $(STAMP)
	$(BIN)/mpwatch run --headless --max-steps 60 samples/char_gpt.py
	$(BIN)/mpwatch show latest

test: $(STAMP)
	$(BIN)/python -m pytest -q -n logical --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mpwatch needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,plan,samples,dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV)
