# `make demo` and `make test` need nothing but Python: each sets up what it uses.
PYTHON ?= python3
PIP_FLAGS = --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-tl4 lint types docs bench evaluation clean

demo: .venv/.ready
	.venv/bin/tensorlens-tl demo

test: .venv/.ready
	.venv/bin/python -m pytest

test-tl4: .venv-tl4/.ready
	.venv-tl4/bin/python -m pytest

lint: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/.ready
	.venv/bin/pyright --pythonpath .venv/bin/python

docs: .venv/.docs
	.venv/bin/python -m sphinx -W --keep-going -b html docs docs/_build/html

bench: .venv/.ready
	.venv/bin/python benchmarks/run.py

evaluation: .venv/.ready
	.venv/bin/python benchmarks/evaluation.py

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install $(PIP_FLAGS) torch "transformer-lens==3.9.0" -e ".[dev]"
	touch $@

.venv-tl4/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-tl4
	.venv-tl4/bin/python -m pip install $(PIP_FLAGS) torch "transformer-lens==4.3.0" -e ".[dev]"
	touch $@

.venv/.docs: .venv/.ready
	.venv/bin/python -m pip install $(PIP_FLAGS) -e ".[docs]"
	touch $@

clean:
	rm -rf .venv .venv-tl4 demo.html report.html docs/_build
