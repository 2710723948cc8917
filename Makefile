# `make demo` and `make test` work in a fresh clone: they make their own environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := .venv-demo

# Processes that tests start would compile all modules again, 70 ms each.
unexport PYTHONDONTWRITEBYTECODE

# Of each target of `make fuzz`, and at most of `make test`, where two run at a time: 16 targets take about a minute
# then, and at most two with the 10 seconds of CI.
SECONDS ?= 60
CI_SECONDS ?= 5

# Tests wait a fifth of their time for servers, locks and processes: three workers keep two cores busy.
WORKERS ?= 3

.PHONY: demo dist installs lowest site quick test coverage crash crash-remote memory oracle oracle-one damage lint types fuzz bench docs clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $(STAMP)

# A separate environment of 0.26 GB, because that of `make test` takes 1.6 GB.
demo: $(DEMO)/.installed
	$(DEMO)/bin/ckpt demo

$(DEMO)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

# What a contributor runs on each change, under a minute: style, types where mypy has seen the rest, and the rooms that
# touch no process, network or large file.
QUICK := core array mapping plan
quick: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	CI=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(addprefix tests/,$(QUICK)) \
	  --ignore tests/plan/test_parts.py --ignore tests/plan/test_many_hosts.py  # They start processes.

test: $(STAMP) lint types
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
	$(BIN)/python tests/fuzz/run.py --seconds $(CI_SECONDS) --seed 1 --jobs 2 --runs tests/fuzz/ci.json

# Statements and branches of some rooms that their tests run, for the table in CONTRIBUTING.md. ROOMS="..." names
# others; tests of time and memory would measure the tracer.
ROOMS ?= $(QUICK) codecs
coverage: $(STAMP)
	$(BIN)/coverage erase
	CI=1 $(BIN)/coverage run -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(addprefix tests/,$(ROOMS))
	$(BIN)/coverage combine --quiet
	$(BIN)/python tests/releases/coverage_by_room.py $(ROOMS)

# Every crash state, every failing call and 200 interleavings of each kind, where `make test` tries some.
crash: $(STAMP)
	CKPTTOOLS_CRASH=all $(BIN)/python -m pytest -n 2 tests/crash

# 100 conversions to gs:// killed at random moments, about 8 minutes, where `make test` tries a few.
crash-remote: $(STAMP)
	$(BIN)/python tests/crash/remote.py 100

# Compares doctor and conversions with transformers on 500 damaged models; `make test` tries 60. With TORCH=PYTHON, the
# interpreter of an environment with torch and transformers records the verdicts again.
damage: $(STAMP)
	$(if $(TORCH),$(TORCH) tests/damage/verdicts.py 500 tests/damage/verdicts.json)
	CKPTTOOLS_DAMAGE=all $(BIN)/python -m pytest -q -n 2 tests/damage/test_damage.py

# Every command at every budget on 100,000 tensors, an hour or more, where `make test` tries some.
memory: $(STAMP)
	CKPTTOOLS_MEMORY=all $(BIN)/python -m pytest -n 2 tests/memory/test_memory_matrix.py

# MaxText and transformers themselves on what is converted, 3 to 6 minutes for each model and form of its layers:
# FAMILY=llama,qwen3-next for some. ORACLE_MAXTEXT and ORACLE_TORCH name environments that are there.
oracle: $(STAMP)
	$(BIN)/python tests/oracle/run.py $(FAMILY)
	$(BIN)/python docs/generate.py oracle.md

# One model of it by MaxText alone, beside logits that transformers gave once; about 100 seconds, 60 of them for the
# environment.
oracle-one: $(STAMP)
	tests/oracle/setup.sh .venv-oracle maxtext
	$(BIN)/python -m pytest -q tests/oracle/test_oracle.py -k "maxtext or weights_in_another_order"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/style/check.py

types: $(STAMP)
	$(BIN)/mypy

fuzz: $(STAMP)
	$(BIN)/python tests/fuzz/run.py --seconds $(SECONDS)

bench: $(STAMP)
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/bare_copy.py
	$(BIN)/python benchmarks/formats.py
	$(BIN)/python benchmarks/deepseek.py
	$(BIN)/python benchmarks/references.py
	$(BIN)/python benchmarks/inspect_tree.py
	$(BIN)/python benchmarks/stats.py
	$(BIN)/python benchmarks/hash.py
	$(BIN)/python benchmarks/diff.py

# A wheel and a source distribution in dist/, the same bytes from the same files.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

# Installs the wheel with pip, uv and pipx for each installed Python, and runs the demo.
PYTHONS ?= python3.11 python3.12 python3.13
installs: dist
	$(BIN)/python tests/releases/installs.py dist/*.whl $(PYTHONS)

# The tests of `make quick` with the oldest versions that pyproject.toml allows.
lowest: $(STAMP)
	$(BIN)/uv venv --quiet --python $(PYTHON) .venv-lowest
	$(BIN)/uv pip install --quiet --python .venv-lowest --resolution lowest-direct -e '.[dev]'
	CI=1 .venv-lowest/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(addprefix tests/,$(QUICK))

# The documentation as a site in site/; pages may be opened as files. Broken links are errors.
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict -f docs/site/mkdocs.yml

docs: $(STAMP)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) $(DEMO) .venv-oracle .venv-lowest dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage*
