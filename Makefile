# `make demo` and `make test` work in an empty clone: they make .venv and install pinned versions.

PYTHON ?= python3
# Some tests wait for what others do: one more than the cores of a small machine keeps these busy.
WORKERS ?= 3
EXTRAS ?= torch,models,serve,energy,plot,ray,dev,bench

# Debian packages that the tests need besides Python: a browser, network namespaces for the emulated
# link, and Slurm, of which tests start daemons of their own: a policy that is there meanwhile keeps the
# services of the packages from starting.
APT_PACKAGES ?= chromium iproute2 slurm-wlm munge

comma := ,
BIN := .venv/bin
PINS := pyproject.toml constraints.txt
PIP_INSTALL := $(BIN)/pip install --quiet --quiet --disable-pip-version-check -c constraints.txt
BENCHMARKS := $(filter-out benchmarks/_%,$(sort $(wildcard benchmarks/*.py)))

# One stamp for what the demo needs and one for each set of extras, which holds that too.
DEMO := .venv/.installed-demo
FULL := .venv/.installed-$(subst $(comma),-,$(EXTRAS))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test check format coverage bench clean system

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(DEMO) ## measure, plan and train a small GPT here; plan a large one over a mixed cluster
	$(BIN)/partita demo

test: system $(FULL) ## run the whole test suite
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

check: $(FULL) ## format, lint, types, architecture and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src
	$(BIN)/pytest -q tests/test_architecture.py
	$(BIN)/pytest -q -n $(WORKERS) -m "not slow"

format: $(FULL) ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

coverage: system $(FULL) ## the whole suite with branch coverage, and the floors it must reach
	$(BIN)/pytest -n $(WORKERS) --cov --cov-report=
	$(BIN)/coverage report --fail-under=85
	$(BIN)/coverage report --fail-under=95 \
	    --include='src/partita/core/*,src/partita/cost/*,src/partita/planners/*,src/partita/program/*,src/partita/objectives/*,src/partita/bounds/*'

bench: $(FULL) ## run every benchmark against its recorded bounds
	@failed=; \
	for file in $(BENCHMARKS); do \
	    echo "$(BIN)/python $$file --check"; \
	    $(BIN)/python "$$file" --check || failed="$$failed $$file"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

clean: ## remove .venv, caches and build results
	rm -rf .venv dist build htmlcov .coverage .coverage.* .hypothesis \
	    .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	$(PYTHON) -m venv .venv

# torch goes first and by its exact version, so that a build already at hand (CPU only) is kept. So does the
# build tool, because pip's constraints do not reach an isolated build.
define INSTALL
	@echo "installing partita[$(1)] into .venv"
	@$(PIP_INSTALL) "$$(grep '^torch==' constraints.txt)" hatchling editables
	@$(PIP_INSTALL) --no-build-isolation --editable ".[$(1)]"
endef

$(DEMO): $(PINS) | $(BIN)/pip
	$(call INSTALL,torch)
	@touch $@

$(FULL): $(PINS) | $(BIN)/pip
	$(call INSTALL,$(EXTRAS))
	@touch $(DEMO) $@

system:
	@missing=; \
	for package in $(APT_PACKAGES); do \
	    dpkg -s "$$package" >/dev/null 2>&1 || missing="$$missing $$package"; \
	done; \
	[ -z "$$missing" ] && exit 0; \
	[ "$$(id -u)" = 0 ] || sudo=sudo; \
	$$sudo sh -c 'set -e; policy=/usr/sbin/policy-rc.d; \
	    if [ ! -e $$policy ]; then \
	        trap "rm -f $$policy" EXIT; \
	        printf "#!/bin/sh\nexit 101\n" > $$policy; chmod 755 $$policy; \
	    fi; \
	    apt-get update -q; apt-get install -qy --no-install-recommends "$$@"' sh $$missing
