# Two commands: `make demo` shows the collection at work on three real hosts; `make test` runs what CI runs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
HOSTS := $(PYTHON) tests/hosts/hosts.py
STAMP := $(VENV)/.requirements-$(shell cat tests/requirements.txt | cksum | cut -d' ' -f1)

export PATH := $(BIN):$(PATH)
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/collections
export ANSIBLE_FORCE_COLOR ?= false
export PYTHONUNBUFFERED := 1

.PHONY: help demo demo-hosts demo-local test test-all lint unit hosts-test molecule docs bench build clean

help: ## Say what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

$(STAMP): tests/requirements.txt
	@echo "==> Python environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -r tests/requirements.txt
	@rm -f $(VENV)/.requirements-*; touch $@

demo: $(STAMP) ## Three hosts with three faults: probe, plan, mend, serve, prove; then once more: nothing changes
	@tests/demo/demo.sh

test: $(STAMP) ## Lint, unit tests, real hosts with a real SGLang: what CI runs
	@tests/run fast

test-all: $(STAMP) ## And the slow matrices: real wheels, real nvcc, several SGLang versions
	@tests/run all

lint: $(STAMP) ## Linters only
	@tests/run lint

unit: $(STAMP) ## Unit tests only
	@tests/run unit

hosts-test: $(STAMP) ## Tests on real hosts only
	@tests/run hosts

bench: $(STAMP) ## Speed, as ratios taken in one run
	@tests/run bench

docs: $(STAMP) ## Make the generated pages
	$(BIN)/python docs/tools/make_causes.py
	$(BIN)/python docs/tools/make_rejections.py
	$(BIN)/python docs/tools/make_reference.py

build: $(STAMP) ## The collection's artifact
	$(BIN)/ansible-galaxy collection build --force

clean: ## Remove test hosts and caches
	$(HOSTS) clean --caches
	rm -rf $(VENV) .ansible .mypy_cache .ruff_cache .pytest_cache .hypothesis tests/output artifacts
