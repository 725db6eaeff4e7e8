VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
DEMO_STAMP := $(VENV)/.stamp-demo
SHELL := /bin/bash  # pipefail

# Succeeds when the interpreter named before it is new enough and can create a virtual environment.
PROBE := -c 'import sys; assert sys.version_info >= (3, 11); import ensurepip, venv'

# The first interpreter that qualifies; override with `make PYTHON=/path/to/python ...`.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	if $$p $(PROBE) >/dev/null 2>&1; then echo $$p; break; fi; done)

# What Python has compiled is kept, whatever the environment says: hundreds of processes of the tests load the same modules.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := test
.PHONY: setup demo test quick accuracy check docs matrix mutants export-check weights-check gpu-check experiments-check clean

# Creates the virtual environment and installs the package with the extras $(1); prints each package as pip begins with it.
define install
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
		echo "error: shardwise needs Python 3.11 or newer with the venv and ensurepip modules;" >&2; \
		echo "none of python3.11, python3.12, python3.13, python3 qualifies. Install one, or run: make PYTHON=/path/to/python" >&2; \
		exit 1; \
	elif ! "$$python" $(PROBE) >/dev/null 2>&1; then \
		echo "error: shardwise needs Python 3.11 or newer with the venv and ensurepip modules; '$$python' does not qualify" >&2; \
		echo "(it reports: $$("$$python" --version 2>&1 | head -n 1))" >&2; \
		exit 1; \
	fi; \
	echo "creating $(VENV) with $$python, with shardwise[$(1)]: $(2)"; \
	"$$python" -m venv $(VENV)
	@set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check -e '.[$(1)]' -c constraints.txt \
		| sed -u -n 's/^Collecting \([^ ]*\).*/  \1/p; s/^Installing collected packages.*/  installing them/p'
endef

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(call install,dev,1.5 GB to download in all, some minutes)
	@touch $@ $(DEMO_STAMP)

# The demo needs PyTorch alone: what runs a plan, not what checks it.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(call install,train,about 300 MB to download, a minute or two)
	@touch $@

demo: $(DEMO_STAMP)
	$(BIN)/python examples/demo.py

# More workers than the two cores it is timed on: tests with several processes wait for one another.
test: setup
	$(BIN)/python -m pytest -n 3

# The test files that killed 90% of the recorded mutants, those with most kills per second first: while you work.
quick: setup
	$(BIN)/python -m pytest -n 3 $$($(BIN)/python tests/order.py)

# The fit to the published runs and its folds, made again: what the package, the README and docs/accuracy.md say of it.
accuracy: setup
	$(BIN)/python -m pytest -m matrix tests/unit/calibrate/test_published_fit.py tests/unit/serve/test_serving_fit.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) docs

# The site, into build/site: fails on every warning, and where a page would load something from another host. The variable leaves out
# a banner of Material for MkDocs about its end of maintenance.
docs: setup
	$(BIN)/python docs/generate/stage.py build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python docs/generate/offline.py build/site

# Every axis alone and with every other, each layout held against one process, then the tests of further combinations, and 300
# examples of each property: hours.
matrix: setup
	$(BIN)/python tests/distributed/matrix.py
	$(BIN)/python -m pytest -n 3 --hypothesis-profile matrix -m 'matrix or hypothesis'

# Whether the tests notice what changes in the planner and the engine; goes on where it was interrupted. Hours: see the script.
mutants: setup
	$(BIN)/python benchmarks/mutants.py

# Random launches and the catalogue's models of every framework, judged by the framework itself in an environment of its own; a table
# at the end. Gigabytes, half an hour; CHECK="megatron maxtext --count 300" for some of them (benchmarks/export_check/README.md).
export-check: setup
	$(BIN)/python benchmarks/export_check/run.py $(CHECK)

# Random small models, loaded, computed and saved by torchtitan and Megatron-LM in environments of their own. Gigabytes, ten minutes.
weights-check: setup
	$(BIN)/python benchmarks/weights_check/run.py

# Everything that only a GPU can show, with the PyTorch that `python3` has: see the script.
gpu-check:
	python3 benchmarks/gpu_check.py --out benchmarks/gpu/$$(date +%Y-%m-%d).json

# Tiny runs with injected faults, under a driver that is killed; and a ledger of many lines. Five minutes, or seconds with
# RUNS=14 DRIVER_KILLS=3 LINES=2000.
RUNS ?= 500
DRIVER_KILLS ?= 20
LINES ?= 100000
experiments-check: setup
	$(BIN)/python benchmarks/experiment_faults.py --runs $(RUNS) --driver-kills $(DRIVER_KILLS)
	$(BIN)/python benchmarks/experiment_ledger.py --lines $(LINES)

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
