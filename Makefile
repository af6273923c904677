# make demo   set everything up and run the demo: prints the path of a report
# make test   set everything up; linter, types, layering, tests
# make bench  the measurements that README quotes
# make docs   the documentation, in build/site
# make notebooks  runs the notebooks again and keeps what they show
# make fix    let the linter repair what it can

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$p && break; done)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test lint bench docs notebooks fix clean

demo: $(VENV)/.installed
	$(BIN)/attnlens run --plugins cp,spectrum demo

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(VENV)/.developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.developed
	$(BIN)/python -m benchmarks

docs: $(VENV)/.developed
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(VENV)/.developed
	$(BIN)/python examples/refresh.py

fix: $(VENV)/.developed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "attnlens needs Python 3.11, 3.12 or 3.13; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch comes first: the version that the constraints pin is then the one that everything else takes.
$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing (torch is large; the first time takes minutes) ..."
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

$(VENV)/.developed: $(VENV)/.installed
	$(PIP) --editable ".[dev,docs]"
	@touch $@
