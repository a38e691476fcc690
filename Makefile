# Two commands for a newcomer: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all check format bench-plain verify clean help

help:                    ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */ - /'

demo: $(VENV)/.installed ## fetch the default model, generate with speculation, compare with plain decoding
	@$(BIN)/outrider generate --compare --max-tokens 160 \
	  "Rewrite this function with type hints and a docstring, and keep the rest as it is: def area(width, height): if width < 0 or height < 0: raise ValueError('sides must not be negative'); return width * height"

test: $(VENV)/.tested check ## lint, types and the whole test suite
	$(BIN)/python -m pytest -n 2

test-all: $(VENV)/.tested check ## the same, and what takes minutes longer
	$(BIN)/python -m pytest -n 2 -m ""

check: $(VENV)/.tested   ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.tested  ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

verify: $(VENV)/.installed ## every drafter against plain decoding, on the default model, in fp32 and bf16
	$(BIN)/outrider verify --limit 20 --max-tokens 64 --dtype float32
	$(BIN)/outrider verify --limit 20 --max-tokens 64 --dtype bfloat16

bench-plain: $(VENV)/.tested ## plain decoding against transformers, interleaved
	$(BIN)/python bench/plain.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Outrider needs Python 3.11 or newer; set PYTHON=/path/to/python3.11."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing Outrider into $(VENV) (a few minutes the first time) ..."
	@$(PIP) --editable '.[serve]'
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	@echo "Installing the test extras ..."
	@$(PIP) --editable '.[test]'
	@touch $@

clean:                   ## remove the environment and caches of this folder
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
