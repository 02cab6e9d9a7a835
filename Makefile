# Each target makes .venv by itself when it is missing, or when pyproject.toml or constraints.txt has changed since.
PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=
BIN := .venv/bin
NATIVE := setup.py paceline/native/build.py $(wildcard paceline/native/*.[ch])
export OMP_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE :=  # tests are compiled once, not by each of the processes that run them

.PHONY: demo test test-bridges unit soak lint docs bench bench-peers pins clean

demo: .venv/.made
	$(BIN)/paceline demo

test: .venv/.made
	$(BIN)/python -m pytest -q $(PYTEST_ARGS)

# Bridges to libraries that are too large for .venv have an environment of their own.
# TensorFlow compiles functions that it has written into files, and would leave their byte code in the temporary folder.
test-bridges: export PYTHONDONTWRITEBYTECODE = 1
test-bridges: .venv-bridges/.made
	.venv-bridges/bin/python -m pytest -q -m bridges -n 2 $(PYTEST_ARGS) tests/bridges

.venv-bridges/.made: pyproject.toml constraints.txt $(NATIVE)
	test -x .venv-bridges/bin/python || $(PYTHON) -m venv .venv-bridges
	.venv-bridges/bin/python -m pip install --quiet -c constraints.txt -e '.[test-bridges]'
	@touch $@

unit: .venv/.made
	$(BIN)/python -m pytest -q -m unit $(PYTEST_ARGS)

soak: .venv/.made
	$(BIN)/python -m pytest -q -m soak --timeout 3600 $(PYTEST_ARGS)

lint: .venv/.made
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in build/site, which opens without a server. Warnings are errors, such as a page that isn't in mkdocs.yml.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: .venv/.made
	$(BIN)/paceline bench collectives
	$(BIN)/paceline bench training

# Measures what is missing (BENCH_ARGS narrows it, see benchmarks/README.md), then writes its part of docs/results.md.
bench-peers: .venv/.made
	$(BIN)/python -m benchmarks.peers --install $(BENCH_ARGS)
	$(BIN)/python -m benchmarks.peers report

# Versions and hashes of all that a release installs, and of the tools that build it. Run it after each change of
# constraints.txt or of a dependency, and commit both files.
pins: .venv/.made
	$(BIN)/python -m pip install --quiet uv
	$(COMPILE) -c constraints.txt -o constraints-release.txt pyproject.toml
	$(COMPILE) --group release -o .github/build-requirements.txt

COMPILE = $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command 'make pins'

# When only the C library's sources have changed, only the library is built. If there is no compiler (exit code 3),
# pip brings one.
.venv/.made .venv/.docs: .venv/.%: .venv/.%-installed $(NATIVE)
	$(BIN)/python paceline/native/build.py || { test $$? = 3 && echo 'pip fetches a compiler for this build' \
		&& $(BIN)/python -m pip install --quiet --no-deps -e .; }
	@touch $@

.venv/.made-installed: EXTRA = test
.venv/.docs-installed: EXTRA = docs
.venv/.made-installed .venv/.docs-installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "paceline needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRA)]'
	$(BIN)/python -m compileall -q paceline  # also where PYTHONDONTWRITEBYTECODE is set: it starts a fifth faster
	@touch $@

clean:
	rm -rf .venv .venv-bridges build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis paceline/native/_core.so
