# The commands to remember: make demo | unit | coverage | test | test-slow | test-ci | test-all | check | docs | wheel | bench | soak | fuzz | fuzz-threads | fmt.  Each sets up what it needs in .venv, once.
PYTHON ?= python3.11
PY := .venv/bin/python
# only errors: whatever pip says of its indexes is of no use to whoever runs make
PIP := $(PY) -m pip --quiet --quiet --disable-pip-version-check
# pip compiles every file, one after the other: Python compiles what is imported, and compileall uses all processors
INSTALL := $(PIP) install --no-compile
SOURCES := pyproject.toml setup.py $(wildcard csrc/*)
# bytecode is kept: the tests and their workers would compile gradwire and themselves again in every process
unexport PYTHONDONTWRITEBYTECODE
PYTHONS := src tests benchmarks examples docs/conf.py docs/notebooks/make.py docs/pictures/draw.py setup.py

.PHONY: demo unit coverage test test-slow test-ci test-all check docs docs-links wheel wheel-aarch64 bench soak fuzz fuzz-threads fmt clean
demo: .venv/.demo
	$(PY) -m gradwire demo

# files in the order of tests/conftest.py: the longest first
# three on two cores: tests wait more than they compute
WORKERS ?= 3
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# only after exit code 1, tests that failed: not where pytest was interrupted or could not begin
AGAIN = { [ $$? = 1 ] && echo "Once more, alone:" && $(PY) -m pytest --last-failed --last-failed-no-failures=none -rA; }

# one to three minutes: nothing but functions of one process
unit: .venv/.dev
	$(PYTEST) -m "not slow" tests/unit

# which lines `make unit` runs: a table, and build/coverage/index.html. Apart: tracing takes three times the processor time
coverage: .venv/.dev
	@mkdir -p build
	$(PYTEST) -m "not slow" --cov --cov-report=term:skip-covered --cov-report=html:build/coverage tests/unit

# minutes: every test but the slow ones, and some cases of those with many
test: .venv/.dev
	$(PYTEST) -m "not slow" --durations=25

# what `make test` leaves out, and more broken files; of a test with hundreds of cases that start ranks, twelve
test-slow: .venv/.dev
	$(PYTEST) -m slow --durations=25
	GRADWIRE_FUZZ_EXAMPLES=150 $(PYTEST) -k test_fuzz tests/unit

# for CI: the tests of both in one run, with fewer cases; then those that measure time, when nothing else runs. What fails runs once
# more, alone: ranks that share two processors with other tests miss limits of time now and then. What fails twice fails
test-ci: export GRADWIRE_CI_CASES = 1
test-ci: export GRADWIRE_FUZZ_EXAMPLES = 60
test-ci: .venv/.dev
	@failed=0; \
	$(PYTEST) -m "not timing and not thorough" --durations=40 || $(AGAIN) || failed=1; \
	$(PY) -m pytest -m timing --durations=10 || $(AGAIN) || failed=1; \
	exit $$failed

# every case; most of an hour
test-all: .venv/.dev
	GRADWIRE_ALL_CASES=1 $(PYTEST)

check: .venv/.dev
	$(PY) -m ruff check $(PYTHONS)
	$(PY) -m ruff format --check $(PYTHONS)
	$(PY) -m mypy

# build/docs/index.html: the documentation. A warning is an error
docs: .venv/.docs
	$(PY) -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

# every link to another site leads somewhere
docs-links: .venv/.docs
	$(PY) -m sphinx -q -W --keep-going -b linkcheck docs build/docs-links

# dist/gradwire-...-py3-none-manylinux_....whl: one wheel for every Python and every torch; dist/SHA256SUMS has the hashes of all wheels there.
# wheel-aarch64 needs g++-aarch64-linux-gnu. The variables are not exported: .venv is for this machine
ARCH := $(shell uname -m)
wheel-aarch64: ARCH := aarch64
wheel-aarch64: CROSS := CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64
wheel wheel-aarch64: .venv/.dev
	rm -rf build/lib* build/bdist* build/wheel dist/*_$(ARCH).whl
	$(CROSS) GRADWIRE_LEVELS=all $(PIP) wheel --no-deps --wheel-dir build/wheel .
	PATH=".venv/bin:$$PATH" $(PY) -m auditwheel repair --wheel-dir dist build/wheel/gradwire-*.whl
	cd dist && sha256sum *.whl > SHA256SUMS

bench: .venv/.dev
	$(PY) -m benchmarks

soak: .venv/.dev
	PYTHONPATH=tests:tests/support $(PY) -m soak

fuzz: .venv/.dev
	PYTHONPATH=tests/unit/compressors:tests/support $(PY) tests/support/payload_fuzz.py
	PYTHONPATH=tests/support $(PY) tests/support/ring_fuzz.py address

fuzz-threads: .venv/.dev
	PYTHONPATH=tests/support $(PY) tests/support/lane_fuzz.py
	PYTHONPATH=tests/support $(PY) tests/support/ring_fuzz.py thread

fmt: .venv/.dev
	$(PY) -m ruff check --fix $(PYTHONS)
	$(PY) -m ruff format $(PYTHONS)

# torch alone first and spelled exactly as pinned, so that nothing pulls another build of it
.venv/.torch: .venv/.python constraints.txt
	@$(INSTALL) $$(grep ^torch= constraints.txt)
	@$(PY) -W ignore -c "import torch._dynamo"
	@touch $@

.venv/.python:
	@echo "Setting up .venv (once): installing torch and compiling the C++ kernels. Some minutes, more on a busy machine ..."
	@$(PYTHON) -m venv .venv
	@$(INSTALL) "setuptools>=77"
	@touch $@

# pip waits and uses one processor: the kernels are compiled beside it into src/, and pip itself compiles none
SET_UP = $(PY) setup.py --quiet build_ext --inplace & compiling=$$!; \
	$(MAKE) -s .venv/.torch && GRADWIRE_REFERENCE_ONLY=1 $(INSTALL) -c constraints.txt -e ".[$(EXTRAS)]"; \
	installed=$$?; wait $$compiling && exit $$installed

# what the demo needs
.venv/.demo: EXTRAS = bench
.venv/.demo: .venv/.python constraints.txt $(SOURCES)
	@$(SET_UP)
	@$(PY) -c "import matplotlib.pyplot, sklearn.datasets"
	@touch $@

# and what the tests need: every SIMD level that runs here, and the tools. Python compiles what is imported of the folders that are left out, and
# some packages have files that are no Python 3
.venv/.dev: EXTRAS = bench,dev,docs,transformers,accelerate,lightning,ray,elastic
.venv/.dev: export GRADWIRE_LEVELS = here
.venv/.dev: .venv/.python constraints.txt $(SOURCES)
	@$(SET_UP)
	@$(PY) -m compileall -qq -j 0 -x "/tests/|/transformers/models/" .venv/lib || true
	@touch .venv/.demo .venv/.docs $@

# and what the documentation is made with
.venv/.docs: .venv/.demo
	@echo "Installing Sphinx, a quarter of a minute ..."
	@$(INSTALL) -c constraints.txt -e ".[docs]"
	@touch $@

clean:
	rm -rf .venv build dist runs src/gradwire.egg-info src/gradwire/*.so
