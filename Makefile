# Every target makes the environment that it needs; a second call finds it ready.
VENV := .venv
JAX_MIN := 0.11.2
EXTRAS ?= dev
WORKERS ?= 2
ARGS ?=

python := $(VENV)/bin/python
ready := $(VENV)/.ready-$(EXTRAS)
ready_min := $(VENV)-min/.ready
sources := pyproject.toml scripts/make_env.sh $(wildcard requirements/*.txt)

export JAX_PLATFORMS ?= cpu
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

tests := test test-slow test-gpu test-min
$(tests): export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache
$(tests): export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.3
# The oldest JAX aborts where it writes some executables into the cache.
test-min: export JAX_ENABLE_COMPILATION_CACHE = false

.DEFAULT_GOAL := help
.PHONY: help setup $(tests) lint format quickstart lock clean distclean FORCE
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-12s %s\n", $$1, $$2}' Makefile
	@echo
	@echo 'PYTHON=path names the interpreter (CPython 3.12 or 3.13), EXTRAS=dev,cuda12'
	@echo 'adds CUDA, WORKERS=$(WORKERS) sets test processes, ARGS=... goes to the program.'

setup: $(ready) ## make the environment .venv

test: $(ready) ## run the quick tests
	$(python) -m pytest -n $(WORKERS) $(ARGS)

test-slow: $(ready) ## run the slow tests
	$(python) -m pytest -n $(WORKERS) -m 'slow and not gpu' $(ARGS)

test-gpu: export JAX_PLATFORMS := cuda
test-gpu: $(ready) ## run the GPU tests (needs EXTRAS=dev,cuda12)
	$(python) -m pytest -m gpu $(ARGS)

test-min: $(ready_min) ## run the quick tests with the oldest JAX, in .venv-min
	$(VENV)-min/bin/python -m pytest -n $(WORKERS) $(ARGS)

lint: $(ready) ## check style and types
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m pyright

format: $(ready) ## format and fix what can be fixed
	$(python) -m ruff check --fix-only
	$(python) -m ruff format

quickstart: $(ready) ## run the small ablation on a CPU
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(python) -m experiments.ablate \
		--config=configs/quickstart.py --workdir=runs/quickstart $(ARGS)

lock: pip = $(VENV)-lock/bin/python -m pip
lock: ## write requirements/ anew for one Python (PYTHON=path)
	rm -rf $(VENV)-lock
	scripts/make_env.sh $(VENV)-lock
	$(pip) install -qq --upgrade pip 'setuptools>=77'
	$(pip) install -qq --no-build-isolation -e '.[dev]'
	$(pip) install -qq --dry-run --report $(VENV)-lock/cuda.json 'jax[cuda12,cuda13]'
	$(pip) freeze --all --exclude-editable > $(VENV)-lock/pins.txt
	$(VENV)-lock/bin/python -c '$(pins)' \
		< $(VENV)-lock/cuda.json >> $(VENV)-lock/pins.txt
	LC_ALL=C sort -f $(VENV)-lock/pins.txt \
		> requirements/$$($(VENV)-lock/bin/python -c '$(tag)').txt
	rm -rf $(VENV)-lock

clean: ## remove caches and build output
	rm -rf .jax_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## remove the environments too
	rm -rf $(VENV) $(VENV)-min $(VENV)-lock

pins := import json, sys; [print("{name}=={version}".format(**i["metadata"])) \
	for i in json.load(sys.stdin)["install"]]
tag := import sys; print("py%d%d" % sys.version_info[:2])

# $(call install,directory,extras,edit of the pins)
define install
	@scripts/make_env.sh $(1)
	@echo 'Installing into $(1): a minute or two'
	@sed -E '$(3)' requirements/$$($(1)/bin/python -c '$(tag)').txt > $(1)/constraints.txt
	@$(1)/bin/python -m pip install -qq -c $(1)/constraints.txt pip setuptools
	@$(1)/bin/python -m pip install -qq -c $(1)/constraints.txt --no-build-isolation \
		-e '.[$(2)]'
	@touch $@
endef

$(ready): $(sources)
	$(call install,$(VENV),$(EXTRAS))

$(ready_min): $(sources)
	$(call install,$(VENV)-min,dev,s/^(jaxlib|jax)==.*/\1==$(JAX_MIN)/)

# A PYTHON that .venv was not made with makes it anew.
ifdef PYTHON
base := import sys; print(sys.base_prefix)
prefix = $(shell "$(1)" -c '$(base)' 2>/dev/null)
ifneq ($(call prefix,$(PYTHON)),$(if $(wildcard $(python)),$(call prefix,$(python))))
$(ready): FORCE
endif
endif
