# Everything a newcomer needs: `make demo`, `make test`, `make lint`, `make bench`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 4

.PHONY: demo test lint bench bench-peers install clean

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

test: install
	@PYTHON=$(BIN)/python sh tests/provide_chromium.sh
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install bench-peers
	$(BIN)/python -m benchmarks

bench-peers: .venv-peers/.installed

# hivemind pins versions of its own, so it lives apart from ours.
.venv-peers/.installed: benchmarks/peers-requirements.txt
	sh benchmarks/install_peers.sh .venv-peers $(PYTHON)
	touch $@

clean:
	rm -rf $(VENV) .venv-peers build dist *.egg-info demo-run .pytest_cache .mypy_cache .ruff_cache .hypothesis
