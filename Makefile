# On a fresh machine with Python 3.11 or newer, git and make:   make demo   or   make test
# Everything else (PostgreSQL, Java, Spark, tools) comes as wheels into .venv of this checkout.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
# Tests wait for servers and Spark more than they compute.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, 3 * (os.cpu_count() or 1)))')
# Which tests, as pytest's -m: `make tests MARKED=` runs all of them.
MARKED ?= not long
# Which part of them: `make long PART=2/60` runs the second of 60.
PART ?=
long: PARTED = $(if $(PART),--splits $(notdir $(PART)) --group $(patsubst %/,%,$(dir $(PART))) --splitting-algorithm least_duration)
ARGS ?=
# What runs PostgreSQL's own subscription tests with pgsub as the subscriber.
COMPAT ?= ../shared/tap/run
FUZZ_MINUTES ?= 5
WRITERS_MINUTES ?= 10
SWITCHOVERS ?= 200

.PHONY: venv demo test lint compiled tests long again thorough pythons oldest compat serial bench soak sabotage coverage docs screenshots dist clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@echo "Install pgsub, PostgreSQL and Java into $(VENV): one to three minutes, the first time only."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pgsub needs Python 3.11 or newer: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# what is used of the packages is compiled when it is imported first; most of them is never used
	$(PY) -m pip install --disable-pip-version-check --quiet --no-compile --use-pep517 -e '.[embedded,dev]'
	@$(PY) -m pgsub.spark.training || echo "Spark's start could not be shortened; everything works without that."
	@touch $@

demo: $(STAMP)
	$(VENV)/bin/pgsub demo $(ARGS)

test: tests

# Style, types and import rules; .ci/run runs it, too.
lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict pgsub benchmarks
	$(VENV)/bin/lint-imports

# A run has a thousand processes of Python, which find what another one has compiled.
unexport PYTHONDONTWRITEBYTECODE

# One collection before all others compiles the tests, which every worker would do at the same time.
compiled: $(STAMP)
	@$(PY) -m pytest --collect-only -qq > /dev/null || true

# Servers of other versions are fetched once, where npm is; PGSUB_TEST_BINDIRS=DIR:DIR names others.
tests: $(STAMP) $(if $(COMPILED),,compiled)
	servers=$$($(PY) tests/servers.py) && \
		PGSUB_TEST_BINDIRS="$$servers" $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 20 \
		-m "$(MARKED)" $(PARTED) $(ARGS)

# What takes long: more than an hour on two cores, or a part of it with PART=1/60.
long: MARKED := long
long: tests

# Those that failed the last time, one after the other.
again: $(STAMP)
	servers=$$($(PY) tests/servers.py) && \
		PGSUB_TEST_BINDIRS="$$servers" $(PY) -m pytest --last-failed --last-failed-no-failures none $(ARGS)

# With further variants of what takes long, and the core on every other Python that is here.
thorough: export PGSUB_TEST_THOROUGH = 1
thorough: MARKED :=
thorough: tests pythons

# The suite's core on the oldest of each minor version; PGSUB_TEST_PYTHONS=/usr/bin/python3.11:... names others.
pythons: $(STAMP)
	$(PY) tests/pythons.py core

# The demo and the fast tests on the oldest.
oldest: $(STAMP)
	$(PY) tests/pythons.py oldest

# PGSUB_PG_SOURCE (or TAP_SRC) names a source tree of PostgreSQL; ARGS="--only 001,004" picks scripts.
compat: export TAP_SRC := $(or $(TAP_SRC),$(PGSUB_PG_SOURCE))
compat:
	@test -x "$(COMPAT)" || { echo "make compat: there is no $(COMPAT): COMPAT=PROGRAM names what runs \
	PostgreSQL's src/test/subscription against a checkout of pgsub (--checkout FOLDER)" >&2; exit 1; }
	"$(COMPAT)" --checkout . $(ARGS)

# Every change by a statement of its own; what says how sets are made is left out.
serial: export PGSUB_SET_BASED = off
serial: MARKED :=
serial: override ARGS := $(addprefix tests/,apply tablesync faults commands launcher guards) $(ARGS)
serial: tests

bench: $(STAMP)
	$(PY) -m benchmarks $(ARGS)

# For ten minutes, or ARGS="--minutes 60"; before it hostile publishers for FUZZ_MINUTES, several writers for
# WRITERS_MINUTES, and so many SWITCHOVERS under random kills.
soak: $(STAMP)
	$(PY) tests/hostile.py --minutes $(FUZZ_MINUTES)
	PGSUB_WRITERS_MINUTES=$(WRITERS_MINUTES) $(PY) -m pytest -q -s --show-capture=no tests/apply/test_writers_random.py
	PGSUB_SWITCHOVERS=$(SWITCHOVERS) $(PY) -m pytest -q -s --show-capture=no tests/switchover/test_random_switchovers.py
	$(PY) tests/soak.py $(ARGS)

# All guards, three quarters of an hour; ARGS="--only WORDS" picks some.
sabotage: $(STAMP)
	servers=$$($(PY) tests/servers.py) && PGSUB_TEST_BINDIRS="$$servers" $(PY) tests/sabotage.py $(ARGS)

# All tests, with what they ran of pgsub in every process; .coverage/html has it line by line.
coverage: export PYTHONPATH := $(CURDIR)
coverage: $(STAMP)
	rm -rf .coverage
	-servers=$$($(PY) tests/servers.py) && \
		PGSUB_TEST_BINDIRS="$$servers" $(PY) -m coverage run -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)
	$(PY) -m coverage combine -q
	rm -f .coverage/data.*  # of processes that were killed while they saved
	$(PY) -m coverage html -q -d .coverage/html
	$(PY) -m coverage report --skip-covered

docs: $(STAMP)
	$(PY) -m pgsub.cli.docs

# The pictures of docs/screenshots, recorded from the program between two servers.
screenshots: $(STAMP)
	$(PY) tests/screenshots.py

# The wheel and the source archive, from what is committed.
dist:
	rm -rf build/dist-env build/dist-source dist
	mkdir -p build/dist-source
	git archive HEAD | tar -x -C build/dist-source
	$(PYTHON) -m venv build/dist-env
	build/dist-env/bin/pip install --quiet build
	build/dist-env/bin/python -m build --outdir dist build/dist-source >build/dist.log 2>&1 || (cat build/dist.log; exit 1)
	rm -rf build/dist-env build/dist-source
	@ls dist/*

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
