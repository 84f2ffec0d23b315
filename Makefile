# make setup   .venv with the package and its development extras (runs again only when a build input changed)
# make demo    what thinfer does, on SmolLM2-135M: one table, demo/*.json, demo/*.png   (MODEL=qwen1.5b for the larger)
# make test    the tests          make check   format, lint, types, rooms, file lengths
# make native  rebuild the C++ core now          make clean   remove what was built
PYTHON ?= python3
MODEL ?= smollm2
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
STAMP := .venv/.installed
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(shell find csrc -type f 2>/dev/null)

.PHONY: setup demo test check format native clean

setup: $(STAMP)

# The build tools go into .venv first, so that the build directory stays valid from one build to the next; setuptools
# among them, because a new .venv brings one too old for the extras that come as source.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "thinfer needs Python 3.11 or newer: make setup PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

$(STAMP): $(BUILD_INPUTS) | $(BIN)/python
	$(PIP) install -c constraints.txt scikit-build-core nanobind cmake ninja setuptools
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

native: | $(BIN)/python
	$(PIP) install --no-build-isolation --no-deps -e .

demo: setup
	$(BIN)/thinfer demo --model $(MODEL) --out demo

test: setup
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

check: setup
	$(BIN)/ruff format --check src tests scripts examples
	$(BIN)/ruff check src tests scripts examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_lengths.py src tests scripts examples csrc

format: setup
	$(BIN)/ruff format src tests scripts examples
	$(BIN)/ruff check --fix src tests scripts examples

clean:
	rm -rf build .venv demo
