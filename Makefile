PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed

.PHONY: test test-all mutants demo lint docs wheel clean

# One thread per worker: more threads than cores make the suite 10x slower. Bytecode is kept for the many processes that
# tests start. A worker that is done takes over tests that the other has not begun.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal
test: $(STAMP)
	$(PYTEST) -m "not gpu and not multigpu and not slow"

# The slow tests: every GPU architecture that a wheel ships, every model family, the wheel.
test-all: $(STAMP)
	$(PYTEST) -m "slow and not gpu and not multigpu"

# Plants faults one at a time and lists those that no test catches. Takes an hour or more; K=word selects some.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants -k "$(K)"

demo: $(STAMP)
	$(BIN)/python -m fuseopt demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy fuseopt

# The pages of docs/ as a site. A warning, such as a link that leads nowhere, fails the build.
docs: $(DOCS_STAMP)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d build/docs/doctrees -c docs . build/docs/html
	@echo "docs: build/docs/html/index.html"

# A wheel that has the native libraries in it, for this platform and any Python, in dist/.
wheel: $(STAMP)
	$(BIN)/python -m fuseopt.build.make_prebuilt
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls -l dist

# Only what is imported is compiled to bytecode: all of torch and transformers would take longer than to install them.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist fuseopt/_lib *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
