# The developer's verbs. Each sets up what it needs: a fresh clone and Python 3.11 are enough.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

demo: $(VENV)/ready
	$(BIN)/lmc demo $(DEMO)

test: $(VENV)/ready
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy lmc

# Each writes its result beside itself; run on a machine that does nothing else.
bench: $(VENV)/ready
	$(BIN)/python bench/keys.py --keep
	$(BIN)/python bench/overlap.py --keep
	$(BIN)/python bench/blend_ttft.py --keep
	$(BIN)/python bench/decay.py --keep
	$(BIN)/python bench/quality.py --keep
	$(BIN)/lmc demo --seed 1 --json bench/results/demo.json

# torch by its exact version first: a plain torch may bring gigabytes of CUDA that no test here uses.
$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lmc needs Python 3.11 or later; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
