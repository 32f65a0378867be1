"""Law 6, release: memory, files and threads of an engine go back without a garbage collection."""

import gc
import os
import subprocess
import sys
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from probes import manager_of
from sampling import draws
from torch import nn
from toys import Shape, batches, inputs, layers, module, train

import patrickstar as ps
from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar.testing import NoMeter, assert_same_bits

from .models import config
from .tiers import Room, on_disk, open_files, options, small_engine, worker_threads

SHAPE = Shape(("mlp", "attention", "plain"), tied=True, checkpointing=True)


@pytest.fixture(autouse=True)
def without_collection():
    """Collect what earlier tests left, then run without the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def with_disk(directory):
    shape = Shape(("mlp",) * 4, width=16)
    return small_engine(shape.build, on_disk(shape.build, options("fp32", 1000), directory, batches(1)[0], Room()))


BUILDS = {
    "in memory": lambda _: ps.Engine(SHAPE.build, config("bf16", 256), meter=NoMeter()),
    "evicting": lambda _: ps.Engine(SHAPE.build, config("fp16", 256), meter=NoMeter(), evict_everything=True),
    "with a disk": with_disk,
    "offloading": lambda _: ps.Engine(SHAPE.build, config("bf16", 256, activation_offload=True), meter=NoMeter()),
}


def all_calls(engine, directory):
    """Evaluate, clip, save, load and inspect beside training."""
    train(engine, batches(2))
    with torch.no_grad():
        engine.eval()(*batches(1)[0])
    engine.train()
    engine.backward(engine(*batches(1)[0]))
    engine.clip_grad_norm_(0.1)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    engine.load_state_dict(engine.state_dict())
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    engine.save(directory / "checkpoint", wait=False)
    train(engine, batches(2, 3))
    engine.load(directory / "checkpoint")
    engine.save_pretrained(directory / "export")
    engine.inspect()


def a_failing_forward(engine, directory):
    train(engine, batches(2))
    with suppress(TypeError):
        engine(*batches(1)[0], "surplus")


USES = {
    "steps": lambda engine, _: train(engine, batches(3)),
    "all calls": all_calls,
    "a failing forward": a_failing_forward,
    "a graph without backward": lambda engine, _: (train(engine, batches(4)), engine(*batches(1)[0])),  # chunks held
}
ENDINGS = {
    "close": lambda engine: engine.close(),
    "close without values": lambda engine: engine.close(keep=False),
    "last reference": lambda engine: None,
}


def check_nothing_is_left(objects, files):
    assert not [each() for each in objects if each() is not None]
    assert worker_threads() == []
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("ending", ENDINGS)
def test_everything_goes_back(build, use, ending, tmp_path):
    (swap := tmp_path / "swap").mkdir()
    files = open_files()
    engine = BUILDS[build](swap)
    parts = [weakref.ref(part) for part in (engine, manager_of(engine), *manager_of(engine).chunks.values())]
    USES[use](engine, tmp_path)
    ENDINGS[ending](engine)
    del engine
    check_nothing_is_left(parts, files)


def failing():
    model = nn.ModuleList([SHAPE.build(), SHAPE.build()])
    raise ValueError(f"no model today, after {len(model)}")


with_complex_weight = module(
    lambda m: None, first=SHAPE.build, weight=lambda: nn.Parameter(torch.zeros(3, dtype=torch.complex64))
)


@pytest.mark.parametrize("model", [failing, with_complex_weight, SHAPE.build], ids=["model", "parameter", "memory"])
def test_everything_goes_back_after_a_failing_initialize(model, tmp_path, monkeypatch):
    managers = []
    made = ChunkManager.__init__

    def record(self, *args, **more):
        managers.append(weakref.ref(self))
        made(self, *args, **more)

    def no_memory(*args, **more):
        raise torch.OutOfMemoryError("out of memory, says a test")

    monkeypatch.setattr(ChunkManager, "__init__", record)
    if model == SHAPE.build:
        monkeypatch.setattr("patrickstar._engine.core.Stats", no_memory)
    files = open_files()
    with pytest.raises((ValueError, ps.errors.PatrickStarError, torch.OutOfMemoryError)) as raised:
        ps.initialize(model, config("bf16", 256))
    del raised
    assert managers or model != SHAPE.build
    check_nothing_is_left(managers, files)


PROGRAM = """
import gc, os, sys
import torch
import patrickstar as ps
from toys import inputs, layers, train

torch.set_num_threads(1)
gc.disable()

def one(keep):
    engine, _ = ps.initialize(lambda: layers(512, 4), ps.Config(device="cpu", precision="fp32", chunk_size="1MiB"))
    train(engine, inputs(2, 512))
    if keep is not None:
        engine.close(keep=keep)

def mebibytes():
    address_space, resident = open("/proc/self/statm").read().split()[:2]
    return int(address_space) * 4096 / 2**20, int(resident) * 4096 / 2**20

def all_endings():
    for keep in (False, True, None):
        one(keep)
        yield mebibytes()

before = list(all_endings())
for _ in range(int(sys.argv[1]) // 3):
    after = list(all_endings())
address_space, resident = zip(*((new[0] - old[0], new[1] - old[1]) for old, new in zip(before, after)))
print(min(address_space), max(resident))  # a mapping that finds no gap reserves some more: not after each ending
"""


def test_many_engines_take_the_memory_of_one():
    """Each engine has 16 MiB of model data. The first three leave what libraries keep."""
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(draws(48))], cwd=tests, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    address_space, resident = map(float, done.stdout.split())
    assert resident <= 5, f"{resident:.1f} MiB more are resident, {address_space:.1f} MiB more reserved"
    assert address_space <= 5, f"{resident:.1f} MiB more are resident, {address_space:.1f} MiB more reserved"


def leave_garbage(numel):
    """Leave a tensor that only a collection frees: in a reference cycle, as models are."""
    cycle = [torch.ones(numel)]
    cycle.append(cycle)


def test_tensors_that_only_a_collection_would_free_do_not_break_the_budget():
    """The engine frees them before it refuses a step."""
    build = partial(layers, 64, 6)

    def run(garbage_numel):
        torch.manual_seed(0)
        options = {"device_memory": "96KiB", "host_memory": "4MiB", "chunk_size": 64 * 65 * 4}
        with ps.initialize(build, ps.Config(device="cpu", precision="fp32", **options))[0] as engine:
            for number, batch in enumerate(inputs(4, 64, rows=4)):
                if number == 3:  # a planned one
                    leave_garbage(garbage_numel)
                train(engine, [batch])
            return engine.state_dict(), engine.stats.total.evictions

    (expected, evictions), (found, _) = run(0), run(16 << 10)
    assert evictions > 0
    assert_same_bits(expected, found, "parameters")


def test_unreachable_tensors_of_before_do_not_hide_what_a_step_needs():
    """If they were there when the engine began to measure, non-model data would seem smaller once they are freed."""

    def peak_bytes(garbage_numel):
        leave_garbage(garbage_numel)
        config = ps.Config(device="cpu", precision="fp32", device_memory="1MiB", host_memory="4MiB")
        with ps.initialize(partial(layers, 64, 4), config)[0] as engine:
            gc.collect()
            train(engine, inputs(2, 64, rows=64))
            return engine.stats.total.device_peak_non_model_bytes

    expected = peak_bytes(1)
    assert peak_bytes(1 << 18) == expected > 0


def test_an_earlier_model_that_is_freed_later_does_not_hide_what_a_step_needs():
    """Tensors that were there before an engine never count, and those of its steps always do."""

    def run(older_numel, freed_at):
        older = [torch.zeros(older_numel)]
        options = {"device_memory": "1MiB", "host_memory": "4MiB", "chunk_size": 64 * 65 * 4}
        with ps.initialize(partial(layers, 64, 4), ps.Config(device="cpu", precision="fp32", **options))[0] as engine:
            for number, batch in enumerate(inputs(4, 64, rows=64)):
                if number == freed_at:
                    older.clear()
                train(engine, [batch])
            return engine.stats.total.device_peak_non_model_bytes

    expected = run(1, 0)
    assert expected > 0
    for freed_at in (0, 1, 3):
        assert run(1 << 20, freed_at) == expected
