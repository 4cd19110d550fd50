# make demo   measure this machine; train the digits job under four methods on it, for real and in virtual time
# make test   what must hold before a commit, in minutes
# make all    everything that must hold, whole products of tests included
# make soak   tests that take hours together
# make accelerator   build the device of tests/accelerator, where there is a C++ compiler
# make test-gpu   the checks of docs/research/gpu.md that need a GPU and measure no speed
# make docs   the documentation, into build/docs; warnings are errors
# make bench  dure beside its peers; the table of docs/research/benchmarks.md
# make bench-model  plans, networks, time to accuracy and returns against real runs, in hours
# make quick  a part of it for every day, in under two minutes
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
export OMP_NUM_THREADS ?= 1
# tests start hundreds of processes, which would each compile dure again: half a second each
unexport PYTHONDONTWRITEBYTECODE
PROCESSES ?= $(shell test "$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 1)" -gt 1 && echo 2 || echo 0)

.PHONY: setup test beside-lint all soak quick lint format docs demo bench bench-model accelerator test-gpu clean

setup: $(STAMP)

# torch first: it is the one large download, and everything else must agree with it; then dure, which the others require
$(STAMP): pyproject.toml jobs/pyproject.toml studies/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]' -e ./jobs -e ./studies
	touch $(STAMP)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# a test process that dies ends the suite, which names the test: pytest-xdist waits for ever for a group of the dead one
SHARED = $(BIN)/pytest -n $(PROCESSES) --dist loadgroup --max-worker-restart 0
# what measures seconds of its own runs alone, after the rest; the other files need not be collected again
ALONE = $(shell grep -rl 'mark\.alone' tests jobs/tests studies/tests)
test: setup
	$(MAKE) --no-print-directory -j 2 lint beside-lint
	$(BIN)/pytest -m "alone and not soak and not long" $(ALONE)

# mypy takes one core for most of a minute
beside-lint: setup
	$(SHARED) -m "not alone and not soak and not long"

# the extras that `make setup` leaves out and tests need: 370 MB
all: lint docs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,integrations,wandb,mlflow]' 'ray[train]'
	$(SHARED) -m "not alone and not soak"
	$(BIN)/pytest -m "alone and not soak" $(ALONE)

# what takes minutes: steps of 90 s that must end nothing
SEED ?= 1
COUNT ?= 300
SIGNALS ?= runs/signals.jsonl
LINKS ?= runs/links.jsonl
soak: setup
	mkdir -p $(dir $(SIGNALS))
	$(BIN)/python tests/soak/random_signals.py --count $(COUNT) --seed $(SEED) --log $(SIGNALS)
	$(BIN)/python tests/soak/links.py --count 30 --seed $(SEED) --log $(LINKS)
	$(BIN)/pytest -m soak

# lint; the catalogues, codecs and optimizers; oracles in virtual time; a run on processes per topology; documentation
# without the examples
QUICK := tests/test_tree.py tests/run/test_strategy.py tests/job/test_optimizer.py tests/codec/test_laws.py tests/report \
  tests/oracles/test_equivalences.py tests/oracles/test_topologies.py tests/runtime/launch tests/test_docs.py
quick: lint
	$(SHARED) -m "not alone and not soak and not long" -k "not golden_output" $(QUICK)

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	$(BIN)/python docs/check_links.py build/docs

# the stub of the package, then every file
format: setup
	$(BIN)/python tests/support/public_names.py
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# what the probe measures goes to a file: `dure probe` shows it
demo: setup
	rm -rf runs/demo
	mkdir -p runs/demo
	@echo "Measuring this machine, for about 20 seconds. Other programs that use its cores make the seconds wrong."
	$(BIN)/dure probe digits-mlp --workers 2 --out runs/demo/this-machine.yaml > runs/demo/probe.txt
	$(BIN)/dure compare digits-mlp --strategy bsp --strategy averaging:period=8 --strategy downpour --strategy ssp:bound=3 \
	  --on local --on runs/demo/this-machine.yaml --workers 2 --steps 400 --seed 0 --out runs/demo/runs --report report.html

# the tests of tests/accelerator build it, too
accelerator: setup
	$(BIN)/python tests/accelerator/build.py

# without a CUDA device each check is skipped with the reason
test-gpu: setup
	$(BIN)/python bench/gpu/all_checks.py correctness

# SMOKE=1: small sizes, nothing is written to docs/; BEFORE=CHECKOUT: this checkout against another one as well
bench: setup
	$(BIN)/python bench/all_ratios.py $(if $(SMOKE),--smoke) $(if $(BEFORE),--before $(BEFORE))

bench-model: setup
	$(BIN)/python bench/all_ratios.py --model $(if $(SMOKE),--smoke)

clean:
	rm -rf .venv build dist runs report.html .mypy_cache .ruff_cache .pytest_cache src/*.egg-info jobs/src/*.egg-info studies/src/*.egg-info
