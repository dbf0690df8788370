# Everything a newcomer needs: `make demo`, `make test`, `make lint`, `make bench`; before a change lands `make e2e`;
# before a release `make soak` and `make test-oldest`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= $(shell $(PYTHON) -c 'import os; print(min(8, 1 + os.cpu_count()))')

.PHONY: demo test e2e soak test-oldest wheel wheels lint weigh docs bench bench-peers install clean

install: $(VENV)/.installed

# torch comes first and pinned: a bare requirement would pull the newest build with its CUDA packages.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "swarm needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

demo: install
	$(BIN)/swarm demo

# pytest's workers share the modules that they compile (bytecode), and so do the peers that tests start.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test: install
	$(PYTEST) -m '(not e2e or smoke) and not soak'

e2e: install
	@PYTHON=$(BIN)/python sh tests/provide_chromium.sh
	@PYTHON=$(BIN)/python sh tests/provide_nftables.sh
	$(PYTEST) -m 'e2e and not soak'

soak: install
	$(BIN)/python tests/planted.py
	$(PYTEST) -m soak

# Tests with the oldest versions that pyproject.toml allows, with which nobody develops. It runs only the tests that
# need neither processes nor a browser, since those use the interfaces of these packages. Set TORCH_INDEX to PyTorch's
# index of CPU builds where the default one has builds with CUDA packages only (several GB).
OLDEST_TESTS := tests/cli tests/compression tests/journal tests/recipe tests/peer tests/run tests/owner tests/sharding tests/training \
                tests/web tests/test_api.py

test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest -n $(JOBS) -m 'not e2e and not soak' $(OLDEST_TESTS)

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13) and "the oldest torch needs Python 3.11 or 3.12; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check torch -c constraints-oldest.txt \
	    $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check -e '.[test]' -c constraints-oldest.txt
	touch $@

# The file from which others install this very version: `swarm monitor RECIPE --wheel FILE` hands it out.
wheel: install
	rm -rf build
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/*.whl

# Checks that all packages needed at run time can be installed on Windows and macOS, too; asks the package index.
wheels: install
	$(BIN)/python tests/check_wheels.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Counts how much there is to read, and checks that no layer imports from one above it.
weigh: install
	$(BIN)/lint-imports
	$(BIN)/python tests/weigh.py

# The documentation as a site, in site/index.html; a link that leads nowhere is an error.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo site/index.html

bench: install bench-peers
	$(BIN)/python -m benchmarks

bench-peers: .venv-peers/.installed

# hivemind pins versions of its own, so it lives apart from ours.
.venv-peers/.installed: benchmarks/peers-requirements.txt
	sh benchmarks/install_peers.sh .venv-peers $(PYTHON)
	touch $@

clean:
	rm -rf $(VENV) .venv-peers .venv-oldest build dist site *.egg-info demo-run .pytest_cache .mypy_cache .ruff_cache .hypothesis
