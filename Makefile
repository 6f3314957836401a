# One command per need. Works in a fresh clone with python3 (3.10 or newer, with venv) and make.
#   make demo      a tiny synthetic checkpoint, validated, planned, converted, verified, run and reported on
#   make test      format, lint, types, then every test, those on SGLang included
#   make test-sglang  the shim's contract with SGLang 0.5.16, in an environment of its own
#   make quality   format, lint, types, layers: the fast part of `make test`
#   make style     rewrite the code to the house format
#   make docs      write the generated pages of docs/
#   make bench     the benchmarks (a benchmark whose result is wrong prints no speed)
#   make test-gpu  the tests that need a CUDA card, with the python that PY_GPU names (installs nothing)
#   make bench-gpu the kernels' benchmark on that card
#   make clean     remove everything that these targets made

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# A machine with a card brings its own python with torch, triton and pytest; nothing is installed there.
PY_GPU ?= python3
# Only these files are loaded there: others import what such a machine may lack.
GPU_TESTS := $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)
DEMO := demo-out
# SGLang publishes one wheel per Python version; its pins for 3.11 are in constraints/sglang.txt.
PYTHON_SGLANG ?= $(or $(shell command -v python3.11),$(PYTHON))
VENV_SGLANG := .venv-sglang
PY_SGLANG := $(VENV_SGLANG)/bin/python
CONSTRAINTS := constraints/cpu.txt
# -qq: errors only; pip's warnings about a mirror's layout would bury them.
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check --constraint $(CONSTRAINTS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo lint quality test test-sglang style docs bench test-gpu bench-gpu clean

help:
	@sed -n 's/^#   //p' Makefile

# Three stamps, so that nothing is installed twice: a bare environment, the package, the developer's tools.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("error: `$(PYTHON)`: too old: expected Python 3.10 or newer, found %d.%d\nhint: make PYTHON=python3.11" % v[:2])'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP_INSTALL) --upgrade pip
	@touch $@

$(VENV)/.package: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	@echo "installing dsv4convert and torch into $(VENV) (about a minute, once)"
	@$(PIP_INSTALL) --editable '.[report]'
	@touch $@

$(VENV)/.tools: $(VENV)/.package
	@echo "installing the test tools into $(VENV)"
	@$(PIP_INSTALL) --editable '.[dev,oracle,probe,report,smoke]'
	@touch $@

comma := ,

# $(call step,ARGUMENTS): show a command, run it, show what it says.
define step
	@printf '\n$$ dsv4convert %s\n' '$(1)'
	@$(PY) -m dsv4convert $(1)
endef

demo: $(VENV)/.package
	@rm -rf $(DEMO)
	@mkdir $(DEMO)
	$(call step,synth $(DEMO)/official --scale tiny)
	$(call step,original $(DEMO)/official)
	$(call step,plan $(DEMO)/official)
	$(call step,convert $(DEMO)/official $(DEMO)/int8 --experts int8)
	$(call step,converted $(DEMO)/int8 --reference $(DEMO)/official --read-data --save $(DEMO)/int8-check.json)
	$(call step,convert $(DEMO)/official $(DEMO)/mxfp4 --experts mxfp4)
	$(call step,converted $(DEMO)/mxfp4 --reference $(DEMO)/official --read-data)
	$(call step,probe $(DEMO)/int8 --ids 11$(comma)42$(comma)7$(comma)300 --tokens 4 --reference $(DEMO)/official --golden $(DEMO)/int8-golden.json)
	$(call step,report $(DEMO)/int8 --reference-report $(DEMO)/int8-check.json --golden $(DEMO)/int8-golden.json -o $(DEMO)/int8-report.html)
	@printf '\nThe source, both results and the report lie in $(DEMO)/: official, int8, mxfp4, int8-report.html.\n'

lint: $(VENV)/.tools
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

quality: lint
	$(PY) -m pytest -q tests/test_layers.py

test: lint test-sglang
	$(PY) -m pytest -n 2

# SGLang without its dependencies: what it imports here needs no GPU, and its CUDA libraries are 5 GB.
$(VENV_SGLANG)/.ready: constraints/sglang.txt
	@$(PYTHON_SGLANG) -c 'import sys; v = sys.version_info; (3, 11) <= v < (3, 13) or sys.exit("error: `$(PYTHON_SGLANG)`: the pins for SGLang 0.5.16 are for Python 3.11 and 3.12, found %d.%d\nhint: make PYTHON_SGLANG=python3.11" % v[:2])'
	@echo "installing SGLang 0.5.16 into $(VENV_SGLANG) (about two minutes, once)"
	@$(PYTHON_SGLANG) -m venv --clear $(VENV_SGLANG)
	@$(PY_SGLANG) -m pip install -qq --disable-pip-version-check --requirement $<
	@$(PY_SGLANG) -m pip install -qq --disable-pip-version-check --no-deps sglang==0.5.16 compressed-tensors==0.20.1
	@# Beside the environment, for one test: the others are to see SGLang without it.
	@$(PY_SGLANG) -m pip install -qq --disable-pip-version-check --no-deps --target $(VENV_SGLANG)/tilelang \
	  tilelang==0.1.11 z3-solver==4.15.4 cloudpickle==3.1.3
	@touch $@

test-sglang: $(VENV_SGLANG)/.ready
	$(PY_SGLANG) -m pytest -c tests/sglang/pytest.ini --rootdir . --confcutdir tests/sglang tests/sglang
	# A process sees pictures or it does not, so that these tests are two runs.
	DSV4_TEST_PICTURES=1 $(PY_SGLANG) -m pytest -c tests/sglang/pytest.ini --rootdir . --confcutdir tests/sglang tests/sglang

style: $(VENV)/.tools
	$(PY) -m ruff check --fix-only
	$(PY) -m ruff format

docs: $(VENV)/.package
	$(PY) docs/generate.py

bench: $(VENV)/.tools
	$(PY) benchmarks/bench_structure.py
	$(PY) benchmarks/bench_formats.py
	$(PY) benchmarks/bench_convert.py
	$(PY) benchmarks/bench_hashes.py

test-gpu:
	$(PY_GPU) -m pytest --gpu -m gpu $(GPU_TESTS)

bench-gpu:
	$(PY_GPU) benchmarks/bench_gpu.py

clean:
	rm -rf $(VENV) $(VENV_SGLANG) $(DEMO) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find dsv4convert kernels_ref tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
