# Everything happens in $(VENV), which `make setup` makes from nothing. PYTHON is only used to make it.
PYTHON ?= python3
VENV ?= .venv
PLATFORM ?= auto# cpu, cuda or ascend, where the machine is not what the detection takes it for
TORCH_INDEX ?=# e.g. https://download.pytorch.org/whl/cpu: saves the CPU platform from PyPI's larger torch
MODEL ?=# a checkpoint folder or hub id for `make demo`; empty: a small random one is written
DEMO_ARGS ?=
BENCH ?= bench_predictor bench_codec
BENCH_ARGS ?=
DEVICE ?= all# for `make parity`: cpu, cuda, npu or npu-emulated; all: whatever can run here
PARITY_ARGS ?=# e.g. --no-serve, or --merge results.json with the docs/parity.json of another machine
PYTEST_ARGS ?=
# Groups of tests of which some must be able to run; add cuda or npu on a machine that has the device.
EXPECT ?= vllm
RUN := $(VENV)/bin/python

.PHONY: setup check test test-fast test-ascend-light test-ascend parity demo bench clean

setup:
	@$(PYTHON) scripts/setup_env.py --venv "$(VENV)" --platform $(PLATFORM) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

check: setup
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports
	$(RUN) -m pytest -q tests/test_architecture.py

test: check test-ascend-light
	$(RUN) -m pytest -p tests.expected_groups $(EXPECT:%=--expect-marker %) $(PYTEST_ARGS)

# An emulated Ascend device: the real torch_npu (and for test-ascend vLLM and vllm-ascend) in environments of their own.
# Nothing of it runs on hardware. The first run makes the environments: 1 GB for the light one, 8 GB for the full one.
BED = $(PYTHON) tests/ascend/beds.py $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

# Tests of the seams that also run on a device, here on the emulated one.
SEAMS = tests/unit/test_backends.py tests/unit/test_attention_ops.py tests/unit/test_graph_wrappers.py tests/unit/test_sampling_check.py

test-ascend-light:
	$(BED) light -- python -m pytest -q tests/ascend/light $(PYTEST_ARGS)
	$(BED) light -- python -m pytest -q -m npu $(SEAMS)

test-ascend: test-ascend-light
	ASCEND_EMULATOR_DEFER=1 $(BED) light -- python -m pytest -q tests/ascend/light/test_frames.py tests/ascend/light/test_engine.py tests/ascend/light/test_pump.py \
	  tests/ascend/light/test_packed_weights.py
	$(BED) full -- python -m pytest -q tests/ascend/light
	$(BED) full -- python -m pytest -q -rP -W default tests/ascend/full $(PYTEST_ARGS)

# Every path against eager float32 on a CPU; writes docs/parity.md, .json and .png. Needs the environment only.
parity: setup
	$(RUN) -m tests.parity.run_matrix --device $(DEVICE) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(PARITY_ARGS)

test-fast: setup
	$(RUN) -m pytest -q -m "not slow and not vllm" $(PYTEST_ARGS)

demo: setup
	@$(RUN) scripts/demo.py $(if $(MODEL),--model "$(MODEL)") $(DEMO_ARGS)

bench: setup
	@for name in $(BENCH); do $(RUN) -m benchmarks.$$name $(BENCH_ARGS) || exit 1; done

clean:
	rm -rf "$(VENV)" build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis demo.wav demo-server.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} + ; rm -rf *.egg-info
