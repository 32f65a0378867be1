# Two commands do everything, set-up included: `make train` runs the main job, `make test` all checks and tests.
# They need Python 3.11 or newer, make and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Made last by the set-up: while it is newer than what it depends on, nothing is installed again.
INSTALLED := $(VENV)/installed

.PHONY: train test nightly bench check format clean

# About 42 million parameters: 14 bytes of model data each, under a device budget of less than a quarter of that.
train: $(INSTALLED)
	$(BIN)/patrickstar train \
		--model gpt-40m --vocab-size 8192 --sequence 256 --batch 4 --accumulation 1 \
		--steps 40 --lr 1e-3 --warmup-steps 5 --weight-decay 0.01 --max-norm 1.0 \
		--device auto --device-memory 128MiB --precision bf16 --seed 0 \
		--log runs/train.jsonl

test: check
	$(BIN)/pytest -m "not slow"

nightly: check
	$(BIN)/pytest

bench: $(INSTALLED)
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/small_pc.py

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist runs .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PatrickStar needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $@
