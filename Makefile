# make run   sets up .venv and runs the embedded recipe's quick preset from start to end
# make test  sets up .venv with the test tools and .venv-serve with SGLang, and runs the tests (what .ci/run calls)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# SGLang pins other versions of what the rest is tested with, so it has an environment of its own
SERVE ?= .venv-serve
# threads wait awake for some microseconds, then asleep: several processes share the cores
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 10000
HUBS := tests/unit/hub tests/e2e/test_publish_road.py

# a build of torch for the tests; empty: what pip chooses, which may be a CUDA build of several GB
TORCH ?=

.PHONY: run test test-main test-serve test-slow browser lint clean
run: $(VENV)/.core
	$(BIN)/angelspec recipe run smollm2-dfly-nothink --preset quick

test: test-main test-serve

test-main: $(VENV)/.dev browser
	$(BIN)/ruff check angelspec sglang_ext tests
	ANGELSPEC_REQUIRE_HUBS=1 ANGELSPEC_HUB_MAJOR=2 $(BIN)/python -m pytest -m "not slow" -q -n 2 --dist loadfile

# SGLang pins the other supported major version of huggingface_hub, so the tests of the hubs run here, too
test-serve: $(SERVE)/.ready browser
	ANGELSPEC_REQUIRE_HUBS=1 ANGELSPEC_HUB_MAJOR=1 $(SERVE)/bin/python -m pytest -m "not slow" -q tests/unit/sglang_ext tests/e2e/serving $(HUBS)

# the longer matrices: the law with planted faults, SmolLM2 against stock SGLang, the shipped drafters' recorded figures
test-slow: $(VENV)/.dev $(SERVE)/.ready
	$(BIN)/python -m pytest -m slow -q
	$(SERVE)/bin/python -m pytest -m slow -q tests/e2e/serving

# the page is tested in Chromium; where it is missing and can't be installed, those tests are skipped and say so
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium chromium-driver >/dev/null; } \
	  || echo "chromium is not installed: the tests of the demo page will be skipped (apt-get install chromium chromium-driver)"

lint: $(VENV)/.dev
	$(BIN)/ruff check angelspec sglang_ext tests
	$(BIN)/ruff format --check angelspec sglang_ext tests

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("angelspec needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet $(TORCH) --editable .
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet $(TORCH) --editable '.[dev]'
	touch $@ $(VENV)/.core

$(SERVE)/.ready: pyproject.toml | $(VENV)/bin/python
	$(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/pip install --quiet --editable '.[serve,demo,modelscope]' pytest pytest-timeout scipy selenium
	touch $@

clean:
	rm -rf $(VENV) $(SERVE) build dist *.egg-info
