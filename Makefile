# Targets for a bare checkout: each sets up what it needs. `make help` lists them.
#
# Without an NVIDIA GPU, torch is the CPU build that has the number below. With one, the python that already has
# torch and CUDA is used (no download, so this also works offline), and torch is installed only where it is missing.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
TORCH  := torch==2.13.0
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)

HAS_GPU   := nvidia-smi --list-gpus >/dev/null 2>&1
HAS_TORCH := $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1
QUIET     := --quiet --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu mutants soak sanitize perf lint build wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: build/library/sm_90a.stamp  ## one MoE layer on real text; GPUs if there are any, else the reference backend
	$(VENV)/bin/cute-ep demo --library build/library

test: build/library/all.stamp  ## all tests that need no GPU, the kernels of all architectures built first
	$(PY) -m pytest -n $(JOBS) --dist worksteal --ignore tests/gpu tests

test-gpu: $(VENV)/package.stamp  ## tests on this machine's GPUs, with the kernels in build/library
	@$(PY) -c 'import sys, torch; torch.cuda.device_count() or sys.exit("test-gpu: torch finds no CUDA GPU here")'
	@test -e build/library/manifest.json || $(MAKE) build/library/sm_90a.stamp build/library/hooks.stamp
	@$(PY) -c 'import pytest, xdist' || $(MAKE) $(VENV)/tools.stamp
	@gpus=$$($(PY) -c 'import torch; print(torch.cuda.device_count())'); status=0; \
	every=$${CUDA_VISIBLE_DEVICES:-$$(seq -s, 0 $$((gpus - 1)))}; \
	if [ $$gpus -gt 1 ]; then set -x; \
	    CUDA_VISIBLE_DEVICES=$$every $(PY) -m pytest -n $$gpus --dist worksteal tests/gpu || status=1; \
	    $(PY) -m pytest -k 'gpus or process' tests/gpu || status=1; \
	else set -x; $(PY) -m pytest tests/gpu || status=1; fi; exit $$status

soak: $(VENV)/package.stamp  ## 100,000 random rounds and the faults on this machine's GPUs (SOAK='--seed 1 --seconds 60')
	@test -e build/library/manifest.json || $(MAKE) build/library/sm_90a.stamp
	$(PY) -m tests.soak rounds --library build/library $(SOAK)
	$(PY) -m tests.soak faults --library build/library

mutants: $(VENV)/tools.stamp  ## kernels with a mistake in the protocol each, which tests on a GPU must find (sm_90a)
	$(PY) -m tests.gpu.mutants build

sanitize: $(VENV)/package.stamp  ## compute-sanitizer (memory, races, barriers) over a small case of every kernel
	for tool in memcheck racecheck synccheck; do \
	    compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 1 $(PY) -m tests.gpu.small_case || exit 1; done

perf: $(VENV)/package.stamp  ## measure everything on this machine's GPUs into perf/results (PERF=--quick: a minute)
	@test -e build/library/manifest.json || $(MAKE) build/library/sm_90a.stamp
	$(PY) -m perf.suite --library build/library $(PERF)

lint: $(VENV)/tools.stamp  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	rm -rf build/typed && mkdir -p build/typed
	cp -r cute_ep build/typed && cp -r layouts build/typed/cute_ep  # the places that they import from
	cd build/typed && $(CURDIR)/$(PY) -m mypy --config-file $(CURDIR)/pyproject.toml -p cute_ep

build: build/library/all.stamp  ## compile the kernels of all architectures into build/library

wheel: $(VENV)/package.stamp  ## the wheel with the kernels of all architectures, in dist
	$(PY) -m pip wheel $(QUIET) . --no-deps --wheel-dir dist

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) build dist cute_ep/library cute_ep.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

KERNEL_SOURCES := $(shell find kernels layouts -name '*.py') cute_ep/build.py

build/library/all.stamp: $(VENV)/tools.stamp $(KERNEL_SOURCES)
	$(VENV)/bin/cute-ep build --jobs $(JOBS) --out build/library
	@touch $@

# Variants with hooks that tests/gpu/test_hooks.py runs.
HOOKS := cute_ep.kernels.hooks
build/library/hooks.stamp: $(VENV)/tools.stamp $(KERNEL_SOURCES) tests/gpu/hook_examples.py
	$(VENV)/bin/cute-ep build --jobs $(JOBS) --arch sm_90a --out build/library --epilogue $(HOOKS):residual_add
	$(VENV)/bin/cute-ep build --jobs $(JOBS) --arch sm_90a --out build/library --epilogue $(HOOKS):scale
	$(VENV)/bin/cute-ep build --jobs $(JOBS) --arch sm_90a --out build/library --format bf16,nvfp4 \
	    --router-weights tests.gpu.hook_examples:bfloat16_weight --input-scale tests.gpu.hook_examples:reciprocal
	@touch $@

build/library/%.stamp: $(VENV)/tools.stamp $(KERNEL_SOURCES)
	$(VENV)/bin/cute-ep build --jobs $(JOBS) --arch $* --out build/library
	@touch $@

# The environment with this package and torch. Over a python that has torch and CUDA, a second layer that sees its
# packages (also when that python is itself a virtual environment) and leaves it as it is.
$(VENV)/package.stamp: pyproject.toml
	@if $(HAS_GPU) && $(HAS_TORCH); then set -ex; \
	    $(PYTHON) -m venv --system-site-packages --without-pip $(VENV); \
	    $(PYTHON) -c 'import site; print(*site.getsitepackages(), sep="\n")' > $$(echo $(VENV)/lib/python3*/site-packages)/base.pth; \
	    $(PY) -m pip install $(QUIET) --no-deps --no-build-isolation -e .; \
	else set -ex; \
	    $(PYTHON) -m venv $(VENV); \
	    $(PY) -m pip install $(QUIET) $$(if $(HAS_GPU); then echo torch; else echo $(TORCH); fi) -e .; \
	fi
	@touch $@

# What building, testing and linting need besides.
$(VENV)/tools.stamp: $(VENV)/package.stamp
	$(PY) -m pip install $(QUIET) -e '.[build,test,lint]'
	@touch $@
