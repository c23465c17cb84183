# Everything from nothing: `make demo` or `make test` on a machine with Python >= 3.10, a C++20 compiler and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch first: the build needs it. torchvision beside it, so that pip settles on one torch for both.
BUILD_REQUIREMENTS := "setuptools>=77" "ninja>=1.11" "torch>=2.11" "torchvision>=0.26"
TEST_JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal
WHEEL_DIR ?= dist

.PHONY: help build demo test test-all test-rest test-gpu-emulated bench picture lint wheel asan check-gpu-build clean
.DELETE_ON_ERROR:

help:
	@echo "make demo | test | test-all | test-gpu-emulated | build | bench | picture | lint | wheel | asan | check-gpu-build | clean   (each sets up $(VENV) first)"

$(VENV)/.environment: | check-python
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install $(BUILD_REQUIREMENTS)
	touch $@

.PHONY: check-python
check-python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'myvision needs Python >= 3.10, $(PYTHON) is ' + sys.version)"

# myvision in place with what an extra of pyproject.toml asks for.
$(VENV)/.with-%: $(VENV)/.environment pyproject.toml
	$(BIN)/python -m pip install --no-build-isolation --editable ".[$*]"
	touch $@

# Ninja decides what there is to compile.
build: $(VENV)/.environment
	$(BIN)/python setup.py build_ext --inplace

demo: $(VENV)/.with-demo build
	$(BIN)/python -m myvision demo

# Every kind of test, on a share of each product of types, layouts, options and devices: tests/selection.py.
test: $(VENV)/.with-test build
	$(PYTEST)

# The whole of each product.
test-all: $(VENV)/.with-test build
	$(PYTEST) --all

# What only test-all has.
test-rest: $(VENV)/.with-test build
	$(PYTEST) --rest

# The emulated GPU kernels once more: in every order of threads, and under the sanitizers.
test-gpu-emulated: $(VENV)/.with-test build
	TEST_JOBS=$(TEST_JOBS) $(BIN)/python tools/test_gpu_emulated.py

bench: $(VENV)/.with-demo build
	$(BIN)/python -m myvision bench

# The README's picture, and its table on the screen: docs/speed.md.
picture: $(VENV)/.with-test build
	$(BIN)/python -m myvision bench --picture docs/speed.svg

lint: $(VENV)/.with-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cuh' '*.cu')

# With the GPU library where torch sees a GPU; elsewhere `FORCE_CUDA=1 make wheel` asks for it.
wheel: $(VENV)/.environment
	rm -rf build/lib*
	$(BIN)/python -m pip wheel --no-build-isolation --no-deps --wheel-dir $(WHEEL_DIR) .

asan: $(VENV)/.with-test
	$(BIN)/python tools/asan.py

# Compiles only: needs nvcc, hipcc and clang-19, but no GPU.
check-gpu-build: $(VENV)/.environment
	$(BIN)/python tools/check_gpu_build.py

clean:
	rm -rf build dist *.egg-info $(VENV) myvision/*.so demo_output
