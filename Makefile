# The commands to remember: make demo | test | test-again | check | bench | soak | fuzz | fmt.  Each sets up what it needs in .venv, once.
PYTHON ?= python3.11
PY := .venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-again check bench soak fuzz fmt clean
demo: .venv/.ready
	$(PY) -m gradwire demo

# files in the order of tests/conftest.py: the longest first
test: .venv/.ready
	@rm -f .pytest_cache/v/cache/lastfailed
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=25

# those that failed in the last run, one after the other
test-again: .venv/.ready
	@$(PY) -c "import json; failed = json.load(open('.pytest_cache/v/cache/lastfailed')); assert all('::' in name for name in failed)" \
	2>/dev/null || { echo "the last run told of no failed test, or did not run whole: nothing to repeat"; exit 1; }
	$(PY) -m pytest --last-failed --last-failed-no-failures none

check: .venv/.ready
	$(PY) -m ruff check src tests benchmarks examples setup.py
	$(PY) -m ruff format --check src tests benchmarks examples setup.py
	$(PY) -m mypy

bench: .venv/.ready
	$(PY) -m benchmarks

soak: .venv/.ready
	cd tests && PYTHONPATH=. ../$(PY) -m soak

fuzz: .venv/.ready
	$(PY) tests/payload_fuzz.py

fmt: .venv/.ready
	$(PY) -m ruff check --fix src tests benchmarks examples setup.py
	$(PY) -m ruff format src tests benchmarks examples setup.py

# torch alone first and spelled exactly as pinned, so that nothing pulls another build of it; beside it what of the kernels
# needs no torch is compiled
.venv/.torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet "setuptools>=77" wheel
	$(PY) setup.py --quiet build_levels & $(PY) -m pip install --quiet -r constraints.txt; installed=$$?; wait; exit $$installed
	touch $@

.venv/.ready: .venv/.torch pyproject.toml setup.py $(wildcard csrc/*)
	$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[bench,dev]"
	touch $@

clean:
	rm -rf .venv build runs src/gradwire.egg-info src/gradwire/*.so
