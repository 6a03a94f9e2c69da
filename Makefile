# Every target sets up what it needs; nothing but Python 3.11 to 3.13 has to be there.

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu setup-light quickstart check test-fast test bench clean

BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# Twice the cores of a small machine: more than half of the time, tests wait for what they start.
WORKERS ?= 4
# Where this is set, each of the many processes that the tests start compiles its sources again.
unexport PYTHONDONTWRITEBYTECODE

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '  make %-17s %s\n' "$$name" "$$text"; done

setup: ## make .venv with the CPU stack
	@scripts/setup.sh cpu

setup-gpu: ## make .venv with the CUDA stack
	@scripts/setup.sh gpu

setup-light: ## make .venv without the trainer: environments, evals of endpoints, Hub, pages
	@scripts/setup.sh light

# What the other targets need: the stack that .venv holds, else that of make setup.
.PHONY: stack
stack:
	@scripts/setup.sh

quickstart: ## train a small model on two environments and evaluate it
	@scripts/quickstart.sh

.PHONY: tutorial
tutorial: ## train a pretrained model of 135M parameters to add, in a quarter of an hour or more
	@scripts/tutorial.sh

.PHONY: agent-tutorial
agent-tutorial: ## train a small agent to use a shell in a sandbox
	@scripts/agent_tutorial.sh

check: check-rules check-types ## format, lint, types, import contracts, budgets, registry

.PHONY: check-rules
check-rules: stack
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/telescope hub check registry
	$(BIN)/pytest tests/arch

.PHONY: check-types
check-types: stack
	$(BIN)/basedpyright

.PHONY: check-ui
check-ui: stack browser ## where node is there: the built pages are what their sources say, and accessible
	@scripts/check_ui.sh

RUN_TESTS := $(BIN)/python scripts/run_tests.py --workers $(WORKERS)

test-fast: stack environments sandboxes ## the quick tests of single rules, in under 2 minutes
	@$(RUN_TESTS) fast

# The longest batches begin first, so that no process waits for another at the end.
test: stack environments browser sandboxes containers ## all tests that a change must pass
	@$(RUN_TESTS) engine slow fast

.PHONY: test-nightly
test-nightly: stack environments browser sandboxes containers ## what proves the rare: kills, nodes, learning
	@$(RUN_TESTS) nightly

.PHONY: environments
environments:
	@$(BIN)/telescope env install --shared --allow-sdist cellpylib,pycosat,zss,chess \
		math-reasoning countdown wordle tool-calculator reasoning-gym \
		math-datasets gpqa-diamond ifeval \
		reverse-text alphabet-sort tool-calls wiki-search deepdive text-games \
		python-tool humaneval i3-code swe-small

.PHONY: browser
browser:
	@scripts/browser.sh

.PHONY: sandboxes
sandboxes:
	@scripts/sandboxes.sh

.PHONY: containers
containers:
	@scripts/sandboxes.sh containers

RUNS ?= runs
RUN ?= quickstart

.PHONY: pictures
pictures: stack browser ## the pictures of telescope ui in docs/assets, of the run RUN in the folder RUNS
	$(BIN)/python -m tests.ui.pictures $(RUNS) $(RUN)

.PHONY: test-templates
test-templates: stack ## play the chat templates that llama-cpp-python carries (downloads them)
	$(BIN)/python -m tests.train.chat.templates.published

.PHONY: check-constraints
check-constraints: stack ## show that constraints/ can be installed on each Python (asks the index)
	$(BIN)/python scripts/check_constraints.py

.PHONY: test-lowest
test-lowest: stack sandboxes ## the quick tests with the oldest versions of packages that are allowed
	@scripts/test_versions.sh lowest --workers $(WORKERS)

.PHONY: test-newest
test-newest: stack sandboxes ## the quick tests with the newest versions of packages that are allowed
	@scripts/test_versions.sh newest --workers $(WORKERS)

bench: stack environments ## the benchmarks; results go to benchmarks/results
	@for file in benchmarks/bench_*.py; do echo "$$file"; $(BIN)/python "$$file" || exit 1; done

# Without a GPU, the parts that need none run. More time: make gpu-check MINUTES=60.
MINUTES ?= 10
.PHONY: gpu-check
gpu-check: stack ## what a machine with GPUs proves in 10 minutes, each part against its limit
	$(BIN)/python scripts/gpu_check.py --minutes $(MINUTES)
	@if $(BIN)/python -c "import torch, sys; sys.exit(not torch.cuda.is_available())"; then \
		$(BIN)/pytest -m gpu; \
	else echo "no GPU here: tests marked gpu were left out"; fi

.PHONY: gpu-facts
gpu-facts: stack ## write the facts of the pinned GPU packages anew (downloads their wheels)
	$(BIN)/python scripts/gpu_package_facts.py

.PHONY: gpu-compiles
gpu-compiles: stack ## compile the kernels for GPUs that are not here (downloads 5 GB of CUDA's stack)
	@. scripts/package_index.sh && $(BIN)/uv venv -q --allow-existing --python $(BIN)/python .venv/cuda && \
		$(BIN)/uv pip install -q --python .venv/cuda/bin/python --constraints constraints/gpu.txt \
			-e packages/telescope-core -e 'packages/telescope-train[flash-attn-4]'
	.venv/cuda/bin/python benchmarks/bench_compiled.py

clean: ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
	find packages tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
