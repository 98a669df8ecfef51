# make demo   install, run the main job on the bundled tiny model, say where its report is
# make test   install what tests need, run them
# make mutation   put faults into the code and see each caught by the check named for it
# make lint, make bench, make clean
#
# PYTHON  the interpreter to build .venv with (3.11 or newer; found by itself when possible)
# TORCH   what pip installs as torch; may carry pip options, e.g. another index

TORCH ?= torch==2.13.0
NAME ?= cpu

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
AT_LEAST_311 := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$p -c "$(AT_LEAST_311)" 2>/dev/null; then echo $$p; break; fi; done)

.DELETE_ON_ERROR:
.PHONY: demo install install-test compile test mutation lint bench clean

# A run folder is never overwritten: the previous demo is renamed.
demo: compile
	@if [ -e runs/demo ]; then \
		n=1; while [ -e "runs/demo-$$n" ]; do n=$$((n + 1)); done; \
		mv runs/demo "runs/demo-$$n"; \
		echo "The previous demo is kept as runs/demo-$$n."; \
	fi
	$(BIN)/exactrl train recipes/tiny.toml --out runs/demo
	@[ -f runs/demo/report.html ] || $(BIN)/exactrl report runs/demo
	@echo
	@echo "Report: $(CURDIR)/runs/demo/report.html"

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test
compile: $(VENV)/.compiled

# Tests run in two processes; compiled kernels are there before, so that both do not compile the same ones.
test: install-test compile
	$(BIN)/python -m pytest -n 2

mutation: install-test compile
	$(BIN)/python -m tests.mutations

lint: install-test
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: compile
	$(BIN)/python -m pip install -q -e '.[test]'
	$(BIN)/python -m bench.$(NAME)

# Keeps runs/.
clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find exactrl tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Stamp files: an install is skipped, network and all, until pyproject.toml changes.
$(VENV)/.created:
	@if ! "$(or $(PYTHON),python3)" -c "$(AT_LEAST_311)" 2>/dev/null; then \
		echo "ExactRL needs Python 3.11 or newer; found: $$($(or $(PYTHON),python3) --version 2>&1 | head -n 1)" >&2; \
		echo "Install it, or name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; \
	fi
	@rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "Creating $(VENV) failed; on Debian and Ubuntu install python3-venv first." >&2; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml
	$(PIP) install -q $(TORCH)
	$(PIP) install -q -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install -q -e ".[test]"
	@touch $@

$(VENV)/.compiled: $(VENV)/.installed $(wildcard exactrl/ops/cpu/*.py)
	$(BIN)/python -m exactrl.ops.cpu.compile
	@touch $@
