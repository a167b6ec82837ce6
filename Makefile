# One command each. A virtual environment is made in $(VENV) on first use; override with make VENV=... test
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: help quickstart test check format docs quality large bench bench-cpu gpu clean

help:  ## these lines
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e . openai
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.runtime

quickstart: $(VENV)/.runtime  ## quantize the example model four ways, compare, serve, ask, measure
	$(BIN)/python examples/quickstart.py

test: $(VENV)/.test  ## every test, on the CPU, without a network
	$(BIN)/pytest -q

check: $(VENV)/.test  ## format, lint, types, then every test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -q

format: $(VENV)/.test  ## put the code into its format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.test  ## write the reference pages again from the code
	$(BIN)/python docs/generate.py

quality: $(VENV)/.runtime  ## the table of docs/quality.md, measured anew
	$(BIN)/python examples/quality.py

large: $(VENV)/.runtime  ## memory of quantizing a 7B-shaped model of random weights; hours on two cores
	$(BIN)/python examples/large_model.py

bench: $(VENV)/.runtime  ## latency, throughput and serving of the example model
	$(BIN)/python examples/benchmark.py

bench-cpu: $(VENV)/.runtime  ## our CPU runtime beside llama.cpp, vLLM, OpenVINO and transformers, as far as they are there
	$(BIN)/python examples/bench_cpu.py $(BENCH)

gpu:  ## everything that needs an NVIDIA GPU, in one go; results under $$OUT (default out/gpu)
	$(PYTHON) tests/gpu.py

clean:  ## remove what make made
	rm -rf $(VENV) out build *.egg-info
