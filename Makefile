# make run   sets up .venv and runs the embedded recipe's quick preset from start to end
# make test  sets up .venv with the test tools and runs the tests (what .ci/run calls)
# make test-hubs  runs the tests of the hubs under the other supported major version of huggingface_hub
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_WAIT_POLICY ?= PASSIVE

# what SGLang 0.5.23 installs; the newest 2.x is what the other tests run with
OTHER_HUB ?= 1.33.0

.PHONY: run test test-hubs lint clean
run: $(VENV)/.core
	$(BIN)/angelspec recipe run smollm2-dfly-nothink --preset quick

test: $(VENV)/.dev
	$(BIN)/ruff check angelspec tests
	$(BIN)/python -m pytest -m "not slow" -q -n 2 --dist loadfile

test-hubs: $(VENV)/.dev
	$(BIN)/pip install --quiet --no-deps --target $(VENV)/hub-$(OTHER_HUB) "huggingface_hub==$(OTHER_HUB)"
	PYTHONPATH=$(VENV)/hub-$(OTHER_HUB) $(BIN)/python -m pytest -q tests/unit/hub tests/e2e/test_publish_road.py

lint: $(VENV)/.dev
	$(BIN)/ruff check angelspec tests
	$(BIN)/ruff format --check angelspec tests

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("angelspec needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.core

clean:
	rm -rf $(VENV) build dist *.egg-info
