PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: test test-all mutants demo lint wheel clean

# One thread a worker: several that spin against each other on two cores take ten times as long. Bytecode is kept for the
# many processes that tests start. The worker that is done first takes over what the other has not begun.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal
test: $(STAMP)
	$(PYTEST) -m "not gpu and not multigpu and not slow"

# What `test` leaves out: other architectures of GPUs, every family of models, a wheel.
test-all: $(STAMP)
	$(PYTEST) -m "slow and not gpu and not multigpu"

# Plants faults one at a time, and names those that no test notices. Takes an hour or more; K=word for some of them.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants -k "$(K)"

demo: $(STAMP)
	$(BIN)/python -m fuseopt demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy fuseopt

# A wheel that has the native libraries in it, for this platform and any Python, in dist/.
wheel: $(STAMP)
	$(BIN)/python -m fuseopt.make_prebuilt
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls -l dist

# Only what is imported is compiled to bytecode: all of torch and transformers would take longer than to install them.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist fuseopt/_lib *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
