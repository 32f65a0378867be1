# Two commands do everything, set-up included: `make train` runs the main job, `make test` all checks and tests.
# They need Python 3.11 or newer, make and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Made last by the set-up: while it is newer than what it depends on, nothing is installed again.
INSTALLED := $(VENV)/installed

.PHONY: train test beside parts test-all test-late test-strict nightly nightly-all nightly-late nightly-resident nightly-strict chromium mutations bench bench-disk gpu wheels check docs format clean

# 89 million parameters: 1.3 GB of model data or more, five times the device budget. The precision is what the machine is
# fast in. Where 120 steps take longer than four minutes it does fewer of them.
train: $(INSTALLED)
	$(BIN)/patrickstar train \
		--model gpt2-124m --vocab-size 4096 --sequence 256 --batch 2 --steps 120 --activation-checkpointing \
		--minutes 4 --lr 6e-4 --warmup-steps 10 --weight-decay 0.01 --max-norm 1.0 \
		--device auto --device-memory 240MiB --seed 0 --log runs/train.jsonl

# JOBS: how many tests run at a time.
JOBS ?= 2
PYTEST := $(BIN)/pytest -n $(JOBS) --dist worksteal

# Two lanes: while tests wait for processes and files, the processor does the rest.
BESIDE := check docs test-late test-strict
PARTS := $(INSTALLED) $(BESIDE) test-all
test: $(INSTALLED)
	$(MAKE) --jobs 2 test-all beside
# Its output comes at its end. One process runs its tests: two more would start for little.
beside: $(INSTALLED)
	@mkdir -p build
	@$(MAKE) JOBS=0 $(BESIDE) > build/beside.log 2>&1; status=$$?; cat build/beside.log; exit $$status
# Names of the parts, for the script that says how long each takes.
parts:
	@echo $(PARTS)

FAST := $(PYTEST) -m "not slow"

test-all: $(INSTALLED)
	$(FAST)
test-late: $(INSTALLED)
	$(FAST) --late-copies 1 $(LATE)
test-strict: $(INSTALLED)
	$(STRICT) $(FAST) tests/strict tests/cuda

# Four runs; `make --keep-going nightly` runs those that follow a failed one.
nightly: nightly-all nightly-late nightly-resident nightly-strict

NIGHTLY := $(PYTEST) --hypothesis-profile nightly

nightly-all: check docs chromium
	$(NIGHTLY) tests benchmarks/tests
# A browser for the test of reports, which is skipped without one.
chromium:
	command -v chromium || apt-get install --yes --quiet chromium || echo "no Chromium: install it with apt as root"

nightly-late: check
	$(NIGHTLY) --late-copies 1 tests/autograd tests/laws/test_exactness.py
nightly-resident: check
	$(NIGHTLY) --resident tests/autograd
nightly-strict: check
	$(STRICT) $(NIGHTLY) tests/strict tests/cuda

# Tests without each statement that waits, in turn: an hour.
mutations: $(INSTALLED)
	$(BIN)/python tests/strict/removed_statements.py $(ONLY)

# Tests that need an accelerator run on a simulated one: tests/strict_device.
STRICT := PATRICKSTAR_TEST_DEVICE=strict

# What runs a second time, beside a simulated accelerator: sharing, accumulation and early updates.
LATE := tests/autograd/test_sharing.py tests/autograd/test_accumulation.py tests/autograd/test_early_update.py

bench: $(INSTALLED)
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/adam.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/small_pc.py
	$(BIN)/python benchmarks/readme_table.py

# DISK: a directory on the disk to be measured.
bench-disk: $(INSTALLED)
	$(BIN)/python benchmarks/disk.py --directory $(DISK)
	$(BIN)/python benchmarks/disk_training.py --directory $(DISK)
	$(BIN)/python benchmarks/checkpoints.py --directory $(DISK)

# Tests and measurements on a GPU, in three calls of thirteen minutes together; DEVICE=cpu rehearses them. CALLS: names
# that `--list` prints; MINUTES: limit of each; OUTPUT: directory of the results; FOLDER: wheels of missing packages.
# Needs no network: without the set-up it uses the packages of PYTHON, with those wheels.
DEVICE ?= cuda
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu.py --device $(DEVICE) $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(OUTPUT),--output $(OUTPUT)) $(if $(FOLDER),--wheels $(FOLDER)) $(CALLS)

# Wheels for `make gpu` on a machine without a network: this package's, and what PyTorch does not bring.
wheels: $(INSTALLED)
	$(BIN)/python benchmarks/gpu_wheels.py $(or $(FOLDER),wheels)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site, in build/site; warnings are errors. The variable silences an announcement of the theme's authors.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist runs .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

KERNEL := $(wildcard src/patrickstar/_kernels/cpp/*)

$(INSTALLED): pyproject.toml constraints.txt $(KERNEL)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PatrickStar needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $@
