# make demo | test | lint | wheel-check | test-matrix | fuzz | cubin: each sets up what it needs, repeats are instant.
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
COUNT ?= 2000
NVCC ?= nvcc
VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip --disable-pip-version-check install -q
STAMP := $(VENV)/.stamp
SINGLE := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: help setup demo test test-slow lint wheel-check test-matrix fuzz cubin clean

help:
	@echo "make demo         train a small Mixture-of-Experts model eager, under Inductor and under megamoe"
	@echo "make test         the default suite, on $(JOBS) processes"
	@echo "make test-slow    the tests marked slow and dist as well"
	@echo "make lint         ruff and mypy --strict"
	@echo "make fuzz         $(COUNT) generated graphs against eager, with a summary as JSON"
	@echo "make wheel-check  build the wheel and test it from another folder in an environment of its own"
	@echo "make cubin        compile the CUDA C++ kernels (CUDA 13.0's nvcc)"
	@echo "make test-matrix  the sample in one environment for each supported torch and transformers"

# torch goes first and alone: any other package's range would pull whichever build the index holds as newest.
$(STAMP)-torch-$(TORCH):
	@echo "setting up $(VENV) with $(TORCH)" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) "$(TORCH)"
	@rm -f $(STAMP)-*
	@touch "$@"

$(STAMP)-demo: $(STAMP)-torch-$(TORCH) pyproject.toml
	@$(BIN)/python $(PIP) -e ".[hf]"
	@touch $@

$(STAMP)-dev: $(STAMP)-torch-$(TORCH) pyproject.toml
	@echo "installing the package and its test tools" >&2
	@$(BIN)/python $(PIP) -e ".[hf,test,dev]"
	@touch $@ $(STAMP)-demo

setup: $(STAMP)-dev

demo: $(STAMP)-demo
	@$(BIN)/megamoe demo

test: $(STAMP)-dev
	$(SINGLE) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal tests

test-slow: $(STAMP)-dev
	$(SINGLE) $(BIN)/python -m pytest -q -m "not gpu" tests

lint: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

fuzz: $(STAMP)-dev
	@$(SINGLE) $(BIN)/python -m tests.generator --count $(COUNT) --jobs $(JOBS)

wheel-check: $(STAMP)-dev
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" bash .ci/wheel-check

test-matrix:
	@PYTHON="$(PYTHON)" bash .ci/test-matrix $(CELLS)

CUDA := $(sort kernels/cuda/grouped.cu $(wildcard kernels/cuda/*.cuh))

cubin: kernels/cuda/grouped.sha256

kernels/cuda/grouped.sha256: $(CUDA)
	$(NVCC) -std=c++17 -O3 -cubin -gencode=arch=compute_90a,code=sm_90a -o kernels/cuda/grouped.cubin $<
	xz --force --extreme kernels/cuda/grouped.cubin
	cat $(CUDA) kernels/cuda/grouped.cubin.xz | sha256sum | cut -d' ' -f1 > $@

clean:
	rm -rf $(VENV) .venvs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
