# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE  # else each of the many processes of a test run compiles the sources anew
.DELETE_ON_ERROR:
.PHONY: demo test suite lint types studies docs bench clean

demo: .venv/installed
	$(BIN)/sensorium demo

test: .venv/dev
	@$(MAKE) --no-print-directory -j 3 lint types suite

suite: .venv/dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/dev
	$(BIN)/ruff check src tests examples bench studies
	$(BIN)/ruff format --check src tests examples bench studies

types: .venv/dev
	$(BIN)/mypy

studies: .venv/tutorial
	$(BIN)/python studies/run.py
	$(BIN)/python studies/algorithms.py
	$(BIN)/python studies/digits.py
	$(BIN)/python studies/kills.py

docs: .venv/installed
	$(BIN)/python -m sensorium.recipe.reference_page > docs/recipe.md

bench: .venv/bench
	$(BIN)/python bench/w0.py

.venv/installed: pyproject.toml constraints.txt
	@echo "installing into .venv (1.5 GB; one to five minutes)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e . -c constraints.txt
	touch $@

.venv/dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

.venv/tutorial: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[tutorial]' -c constraints.txt
	touch $@

.venv/bench: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[bench]' -c constraints.txt
	touch $@

clean:
	rm -rf .venv runs build dist src/*.egg-info
