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
PIP       := $(PY) -m pip --disable-pip-version-check
QUIET     := --quiet --quiet
SAY       := @echo make:

# make build ARCH=sm_90a, make wheel ARCH=sm_90a,sm_100a: only these architectures.
ARCH :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu test-bindings test-versions test-upstream mutants soak sanitize perf lint docs build wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

demo: $(VENV)/package.stamp  ## one MoE layer on real text; GPUs if there are any, else the reference backend
	@if $(HAS_GPU); then \
	    (test -e build/library/manifest.json || $(MAKE) build/library/sm_90a.stamp) && \
	    $(VENV)/bin/cute-ep demo --library build/library; \
	else $(VENV)/bin/cute-ep demo; fi

test: $(VENV)/test.stamp build/library/all.stamp  ## all tests that need no GPU, the kernels of all architectures built first
	$(PY) -m pytest -n $$(($(JOBS) + 1)) --dist worksteal --ignore tests/gpu tests  # one more, since some tests wait

test-gpu: $(VENV)/package.stamp  ## tests on this machine's GPUs, with the kernels in build/library
	@$(PY) -c 'import sys, torch; torch.cuda.device_count() or sys.exit("test-gpu: torch finds no CUDA GPU here")'
	@test -e build/library/manifest.json || $(MAKE) build/library/sm_90a.stamp build/library/hooks.stamp
	@$(PY) -c 'import pytest, xdist' || $(MAKE) $(VENV)/test.stamp
	@gpus=$$($(PY) -c 'import torch; print(torch.cuda.device_count())'); status=0; \
	every=$${CUDA_VISIBLE_DEVICES:-$$(seq -s, 0 $$((gpus - 1)))}; \
	set -x; \
	CUDA_VISIBLE_DEVICES=$$every $(PY) -m pytest -n $$((4 * gpus)) --dist worksteal -k 'not process' tests/gpu || status=1; \
	$(PY) -m pytest -k 'gpus or process' tests/gpu || status=1; \
	exit $$status

test-bindings: $(VENV)/test.stamp  ## what is used of cuda-python, in the releases that users may have (13 MB each)
	$(PY) -m tests.bindings

test-versions: $(VENV)/package.stamp  ## tests with the oldest and newest torch, cuda-python and rich (VERSIONS=newest: 7 GB)
	$(PY) -m tests.versions $(VERSIONS)

test-upstream: $(VENV)/package.stamp  ## DeepEP's tests over this package (DEEPEP_SOURCE=DIR, RANKS=2, which may share a GPU)
	@test -f "$(DEEPEP_SOURCE)/tests/legacy/test_intranode.py" || \
	    { echo "test-upstream: DEEPEP_SOURCE=$(DEEPEP_SOURCE): must be the folder of a DeepEP checkout"; exit 1; }
	@test -e build/library/manifest.json || $(MAKE) build/library/sm_90a.stamp
	@mkdir -p build/upstream && ln -sfn ../library build/upstream/cute_ep  # where communicators look for kernels
	for test in legacy/test_intranode.py legacy/test_low_latency.py 'elastic/test_ep.py --skip-perf-test'; do \
	    XDG_CACHE_HOME=$(CURDIR)/build/upstream TORCH_COMPILE_DISABLE=1 \
	    DEEPEP_SOURCE=$(CURDIR)/tests/integrations/upstream:$(abspath $(DEEPEP_SOURCE)) \
	    PYTHONPATH=$$($(PY) -m tests.sharing $(or $(RANKS),2))$$($(PY) -m cute_ep.integrations.deep_ep) \
	    $(PY) $(DEEPEP_SOURCE)/tests/$$test --num-processes $(or $(RANKS),2) || exit 1; done

soak: $(VENV)/package.stamp  ## 100,000 random rounds and the faults on this machine's GPUs (SOAK='--seed 1 --seconds 60')
	@test -e build/library/manifest.json || $(MAKE) build/library/sm_90a.stamp
	$(PY) -m tests.soak rounds --library build/library $(SOAK)
	$(PY) -m tests.soak faults --library build/library

mutants: $(VENV)/build.stamp  ## kernels with a mistake in the protocol each, which tests on a GPU must find (sm_90a)
	$(PY) -m tests.gpu.mutants build

sanitize: $(VENV)/package.stamp  ## compute-sanitizer (memory, races, barriers) over a small case of every kernel
	for tool in memcheck racecheck synccheck; do \
	    compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 1 $(PY) -m tests.gpu.small_case || exit 1; done

perf: $(VENV)/package.stamp  ## measure everything on this machine's GPUs into build/perf (PERF=--quick: a minute)
	@test -e build/library/manifest.json || $(MAKE) build/library/sm_90a.stamp
	$(PY) -m perf.suite --library build/library $(PERF)

lint: $(VENV)/lint.stamp  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy -p cute_ep

docs: $(VENV)/docs.stamp  ## the documents and the API reference as web pages, in build/docs; a broken link is an error
	@rm -rf build/docs
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going -c docs . build/docs
	@cp build/docs/README.html build/docs/index.html
	$(SAY) "wrote build/docs/index.html"

build: $(if $(ARCH),build-some,build/library/all.stamp)  ## compile the kernels into build/library (ARCH=sm_90a: only those)

.PHONY: build-some
build-some: $(VENV)/build.stamp
	$(VENV)/bin/cute-ep build --jobs $(JOBS) --arch $(ARCH) --out build/library

wheel: build  ## the wheel with the kernels of all architectures, in dist (ARCH=sm_90a: with those only)
	$(SAY) "packing the wheel, with the kernels in build/library"
	$(PIP) wheel $(QUIET) . --no-deps --wheel-dir dist $(if $(ARCH),--config-settings arch=$(ARCH))
	$(SAY) "wrote $$(ls -t dist/*.whl | head -1)"
	@$(PY) -m zipfile --list $$(ls -t dist/*.whl | head -1) | grep -q _launcher || \
	    echo "make: without the compiled launcher, since it did not compile here: Python launches all calls"

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) build dist cute_ep/library cute_ep/runtime/*.so cute_ep.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

KERNEL_SOURCES := $(shell find kernels layouts -name '*.py') cute_ep/aot/build.py

build/library/all.stamp: $(VENV)/build.stamp $(KERNEL_SOURCES)
	$(VENV)/bin/cute-ep build --jobs $(JOBS) --out build/library
	@touch $@

# Variants with hooks that tests/gpu/test_hooks.py runs.
HOOKS := cute_ep.kernels.hooks
build/library/hooks.stamp: $(VENV)/build.stamp $(KERNEL_SOURCES) tests/gpu/hook_examples.py
	$(VENV)/bin/cute-ep build --jobs $(JOBS) --arch sm_90a --out build/library --epilogue $(HOOKS):residual_add
	$(VENV)/bin/cute-ep build --jobs $(JOBS) --arch sm_90a --out build/library --epilogue $(HOOKS):scale
	$(VENV)/bin/cute-ep build --jobs $(JOBS) --arch sm_90a --out build/library --format bf16,nvfp4 \
	    --router-weights tests.gpu.hook_examples:bfloat16_weight --input-scale tests.gpu.hook_examples:reciprocal
	@touch $@

build/library/%.stamp: $(VENV)/build.stamp $(KERNEL_SOURCES)
	$(VENV)/bin/cute-ep build --jobs $(JOBS) --arch $* --out build/library
	@touch $@

# The environment with this package and torch, all that a demo needs. Over a python that has torch and CUDA, a second
# layer that sees its packages (also when that python is itself a virtual environment) and leaves it as it is.
$(VENV)/package.stamp: pyproject.toml cute_ep/runtime/launcher.c
	@if $(HAS_GPU) && $(HAS_TORCH); then set -e; \
	    echo "make: an environment in $(VENV), over the torch of $(PYTHON)"; \
	    $(PYTHON) -m venv --system-site-packages --without-pip $(VENV); \
	    $(PYTHON) -c 'import site; print(*site.getsitepackages(), sep="\n")' > $$(echo $(VENV)/lib/python3*/site-packages)/base.pth; \
	    $(PIP) install $(QUIET) --no-deps --no-build-isolation -e .; \
	else set -e; torch=$$(if $(HAS_GPU); then echo torch; else echo $(TORCH); fi); \
	    echo "make: an environment in $(VENV)"; \
	    $(PYTHON) -m venv $(VENV); \
	    echo "make: installing $$torch into it (some hundred MB)"; \
	    $(PIP) install $(QUIET) $$torch; \
	    echo "make: installing cute_ep into it, editable"; \
	    $(PIP) install $(QUIET) -e .; \
	fi
	@touch $@

# What building, testing, linting and documents need besides, by the names of the extras in pyproject.toml.
EXTRA = $(PY) -c 'import sys, tomllib; \
    extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
    print(*extras[sys.argv[1]], sep="\n")'
$(VENV)/test.stamp: $(VENV)/build.stamp
$(VENV)/%.stamp: $(VENV)/package.stamp
	$(SAY) "installing what '$*' needs: $$($(EXTRA) $* | paste -sd ' ')"
	@$(EXTRA) $* | $(PIP) install $(QUIET) -r /dev/stdin
	@touch $@
