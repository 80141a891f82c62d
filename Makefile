# make demo: train, evaluate and report the small default (about ten minutes on two cores); make test: every check but
# those of make test-all;
# make test-newest, make test-oldest: what leans on other libraries, with the newest and the oldest versions that
# pyproject.toml allows; make search: any rule in every form, drawn anew; make bench: everything in docs/results/performance.md.
PYTHON ?= python3
VENV ?= .venv
OUT ?= runs/demo
TOKENS := runs/tokens
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# torch and triton stay as they are tested: another build of torch is gigabytes.
TORCH := torch==2.13.0 'triton==3.6.0; sys_platform == "linux"'
LEANING := tests/models tests/train tests/data tests/eval tests/viz tests/serve tests/test_cli.py tests/test_memory_commands.py

.PHONY: demo test test-all docs dist test-newest test-oldest test-slow search bench clean

demo: $(STAMP) $(TOKENS)/tokenizer.json
	$(BIN)/atlas train --config examples/demo.yaml output_dir=$(OUT) $(if $(wildcard $(OUT)/run.yaml),--resume)
	$(BIN)/atlas report $(OUT)
	$(BIN)/atlas generate $(OUT) --prompt "def"

$(TOKENS)/tokenizer.json: | $(STAMP)
	$(BIN)/atlas tokenizer train --out $(TOKENS) --vocab-size 4096

# The linters run beside the tests. What they say is shown at the end, and only when one of them fails.
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy src benchmarks && $(BIN)/lint-imports

test: $(STAMP)
	@said=$$(mktemp); \
	{ $(LINT); } >"$$said" 2>&1 & lint=$$!; \
	$(BIN)/pytest -n 2 --dist worksteal; failed=$$?; \
	wait $$lint || { failed=1; cat "$$said"; }; \
	rm "$$said"; exit $$failed

# What make test leaves out, since it repeats at length what other tests promise.
test-all: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -m extended

test-newest: | $(VENV)-newest/bin/pip
	$(VENV)-newest/bin/python -m pip install -q -U --upgrade-strategy eager $(TORCH) -e ".[dev]"
	$(VENV)-newest/bin/pytest -n 2 --dist worksteal $(LEANING)

test-oldest: | $(VENV)-oldest/bin/pip
	$(VENV)-oldest/bin/python -m pip install -q -c constraints-oldest.txt -e ".[dev]"
	$(VENV)-oldest/bin/pytest -n 2 --dist worksteal $(LEANING)

$(VENV)-%/bin/pip:
	$(PYTHON) -m venv --clear $(VENV)-$*

# The site, into build/site, without warnings; `.venv/bin/mkdocs serve` shows it while you write.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The wheel and the source distribution, checked.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# Rules, shapes and settings that no run has drawn before: each call draws others.
EXAMPLES ?= 2000
search: $(STAMP)
	HYPOTHESIS_PROFILE=search EXAMPLES=$(EXAMPLES) $(BIN)/pytest tests/ops/test_forms.py tests/data/test_tokens.py

# What every rule does over 2,000 training steps: half an hour.
test-slow: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -m slow

# Everything in docs/results/performance.md, on a machine with nothing else to do.
bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks run
	$(BIN)/python -m benchmarks table

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV): a minute or two"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev,lm-eval]"
	touch $@

clean:
	rm -rf .venv .venv-newest .venv-oldest .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
