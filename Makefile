# Two commands do everything on a machine with Python >= 3.11 and a C++ compiler: `make run` and `make test`.
# A stamp file remembers what is installed, so the second call starts at once.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Explain in one sentence why the sky is blue.
MAX_TOKENS ?= 64

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
NATIVE := $(wildcard CMakeLists.txt) $(shell find src/kvarn/kernels/cpu -name '*.cpp' -o -name '*.hpp' -o -name '*.h')

.PHONY: run test check docs peers clean help

help:
	@echo "make run     environment, model, a prompt answered (PROMPT=..., MAX_TOKENS=...)"
	@echo "make test    environment, the whole test suite"
	@echo "make check   format, lint, types, import directions, generated docs"
	@echo "make docs    generate docs/commands.md and the tables"
	@echo "make peers   the engines that kvarn bench peers compares with"
	@echo "make clean   remove the environment and what was built"

run: $(VENV)/.installed
	$(BIN)/kvarn run -p "$(PROMPT)" --max-tokens $(MAX_TOKENS)

test: $(VENV)/.installed-dev
	VENV=$(VENV) scripts/test

check: $(VENV)/.installed-dev
	VENV=$(VENV) scripts/check

docs: $(VENV)/.installed
	VENV=$(VENV) scripts/docs

$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade "pip>=25.1"
	touch $@

$(VENV)/.installed: $(VENV)/.pip pyproject.toml constraints.txt $(NATIVE)
	$(PIP) install -c constraints.txt -e ".[serve]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -c constraints.txt --group dev
	touch $@

peers: $(VENV)/.installed-dev
	VENV=$(VENV) scripts/peers

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
