# Everything a developer or CI runs. Each environment is built once and rebuilt when its inputs change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
.DEFAULT_GOAL := help

.PHONY: help
help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.13.0 -e '.[cpu,vllm,dev]'
	@touch $@

.PHONY: check
check: $(VENV)/.ready  ## lint, format, types, import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: test
test: check  ## everything that can run without a GPU
	$(BIN)/pytest

.PHONY: clean
clean:  ## remove what the other targets made
	rm -rf $(VENV) .venvs build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
