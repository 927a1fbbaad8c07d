# Everything is set up by the targets themselves: `make demo` and `make test` need only Debian, Python 3.11 and this folder.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The Slurm tests mostly wait, and are two of the groups that tests/conftest.py makes.
# What takes long is begun first (tests/conftest.py): pytest-xdist would begin with the files of many tests.
IN_PARALLEL := --numprocesses 4 --dist loadgroup --no-loadscope-reorder
# So many times the examples of `make test`.
FUZZ := 20

.PHONY: help demo test test-quick fuzz check audit setup ui docs clean

help:
	@echo "make demo        set up, train on the embedded corpus with a stop and a resume, score, translate"
	@echo "make test        set up, run every check and test (the Slurm tests need root, to start a cluster)"
	@echo "make test-quick  the tests that take seconds"
	@echo "make check       ruff and mypy"
	@echo "make fuzz        an hour of other examples than those of make test; FUZZ=200 for ten"
	@echo "make audit       known vulnerabilities of the installed packages"
	@echo "make docs        the documentation site, in build/site"
	@echo "make ui          MLflow's page on the runs in runs/"

setup: $(READY)

# torch is installed first and alone: resolved together with the others it could come as another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	$(PYTHON) -c "import ensurepip" 2> /dev/null || apt-get install --yes python3-venv  # Debian splits it off
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps --target $(VENV)/triton triton  # for tests of kernels
	touch $@

demo: $(READY)
	$(BIN)/dist-transformer demo

test: check
	$(BIN)/python -m pytest $(IN_PARALLEL)

test-quick: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(IN_PARALLEL)

fuzz: $(READY)
	DIST_TRANSFORMER_FUZZ=$(FUZZ) $(BIN)/python -m pytest $(IN_PARALLEL) tests/fuzz

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit: $(READY)
	$(BIN)/python .ci/audit_dependencies.py

ui: $(READY)
	$(BIN)/dist-transformer ui runs

# A link that leads nowhere, also to a heading, fails it.
docs: $(READY)
	$(BIN)/python .ci/settings_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV)
