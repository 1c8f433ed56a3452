# Two commands do everything: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test fuzz lint types bench docs clean

demo: $(VENV)/.demo
	$(BIN)/python examples/ppo_cartpole.py

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# Differential fuzzing for as long as asked, e.g. make fuzz SECONDS=600; stops at the first failing case, made small.
SECONDS_TO_FUZZ = $(or $(SECONDS),300)
fuzz: $(VENV)/.test
	end=$$(($$(date +%s) + $(SECONDS_TO_FUZZ))); \
	while [ $$(date +%s) -lt $$end ]; do \
		SHOAL_FUZZ=1 $(BIN)/python -m pytest tests/differential/test_fuzz.py -x --timeout 0 || exit 1; \
	done

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy src

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/compare.py

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PIP) -e '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) -e '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.bench: $(VENV)/.base
	$(PIP) -e '.[benchmarks]'
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
