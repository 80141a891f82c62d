# make demo: train, evaluate and report the small default (about ten minutes on two cores); make test: every check;
# make bench: measure everything in docs/performance.md.
PYTHON ?= python3
VENV ?= .venv
OUT ?= runs/demo
TOKENS := runs/tokens
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow bench clean

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

# What every rule does over 2,000 training steps: half an hour.
test-slow: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -m slow

# Everything in docs/performance.md, on a machine with nothing else to do.
bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks run
	$(BIN)/python -m benchmarks table

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV): a minute or two"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
