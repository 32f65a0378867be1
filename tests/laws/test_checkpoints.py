"""Checkpoints: a resumed run is bit-identical to an uninterrupted one, whatever the budgets of both."""

import contextlib
import functools
import gc
import random
import shutil
import time

import numpy
import pytest
import torch
from hypothesis import reject
from hypothesis import strategies as st
from sampling import drawn
from seeded import engine_of
from torch.optim.lr_scheduler import LambdaLR
from toys import batches, outcome

from patrickstar import testing
from patrickstar._checkpoint import direct_writer as page_file
from patrickstar._checkpoint.direct_writer import DirectWriter, write_all

from . import tiers
from .models import chunk_sizes, config, precisions, shapes, smallest_device_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


class Run:
    """Training run with a scheduler, a position in the data, and random number generators."""

    def __init__(self, engine, *, seed=0, accumulation=1, max_norm=None, update=False):
        self.engine, self.optimizer = engine, engine.optimizer
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.position = 0
        self.accumulation, self.max_norm, self.update = accumulation, max_norm, update
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    @property
    def state(self):
        return {"run": self, "scheduler": self.scheduler, "note": ("a", 1, {2: 3.5})}

    def go(self, steps, after=lambda: None):
        seen = []
        for _ in range(steps):
            for _ in range(self.accumulation):
                # The loss depends on all three generators, so that a wrong state of any of them is detected.
                ids = (batches(64)[self.position][0] + random.randrange(11) + numpy.random.randint(11)) % 11
                self.position += 1
                loss = self.engine(ids) / self.accumulation
                seen.append(loss.detach().clone())
                self.engine.backward(loss, **({"update": True} if self.update else {}))
            if self.max_norm is not None:
                seen.append(self.engine.clip_grad_norm_(self.max_norm))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            after()
        return seen

    def outcome(self):
        """Return parameters, optimizer states, learning rate and loss scale."""
        optimizer = self.optimizer.state_dict()
        numbers = [optimizer["param_groups"][0]["lr"], *optimizer["loss_scale"].values()]
        return [*outcome(self.engine), torch.tensor(numbers, dtype=torch.float64)]


loops = st.sampled_from([{}, {"accumulation": 2}, {"max_norm": 0.1}, {"update": True}])
rooms = st.sampled_from(["plenty", "evict", "small"])


def options_of(room, shape, precision, chunk_size):
    if room == "small":
        return config(precision, chunk_size, device_memory=smallest_device_bytes(shape, chunk_size, precision))
    return config(precision, chunk_size)


@contextlib.contextmanager
def disk_behavior(how):
    """Simulate a disk whose queue is always full, so that copies are written on demand, or a slow disk."""
    with pytest.MonkeyPatch.context() as patch:
        if "no room" in how:
            patch.setattr(DirectWriter, "has_room", property(lambda file: False))
        if "lags" in how:
            patch.setattr(DirectWriter, "has_room", property(lambda file: True))
            patch.setattr(page_file, "write_all", lambda *args: (time.sleep(0.002), write_all(*args)))
        yield


@drawn(
    25,
    shape=shapes,
    precision=precisions,
    loop=loops,
    chunk_sizes=st.tuples(chunk_sizes, chunk_sizes),
    rooms=st.tuples(rooms, rooms),
    how=st.sampled_from(["wait", "beside", "beside, no room", "beside, lags"]),
    steps=st.tuples(st.integers(1, 3), st.integers(1, 2)),
)
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(
    folder, shape, precision, loop, chunk_sizes, rooms, how, steps
):
    if precision == "fp16":
        loop = {key: value for key, value in loop.items() if key != "update"}
    engines = []
    for room, size in zip(rooms, chunk_sizes, strict=True):
        options = options_of(room, shape, precision, size)
        engines.append(functools.partial(engine_of, shape.build, options, evict_everything=room == "evict"))
    check_resume(folder / "run", *engines, steps, how, **loop)


def needs_disk(engine):
    """Reject examples whose disk is not needed."""
    if engine.config.disk is not None and engine.inspect().disk is None:
        engine.close()
        reject()


def check_resume(checkpoint, first, second, steps, how="wait", **loop):
    shutil.rmtree(checkpoint, ignore_errors=True)
    run = Run(first(), **loop)
    needs_disk(run.engine)
    run.go(steps[0])
    with disk_behavior(how):
        run.engine.save(checkpoint, run.state, wait=how == "wait")
        expected = run.go(steps[1])
    expected_end = run.outcome()
    run.engine.close()

    resumed = Run(second(), seed=1, **loop)
    needs_disk(resumed.engine)
    loaded_state = resumed.engine.load(checkpoint, {"run": resumed, "scheduler": resumed.scheduler})
    assert loaded_state["note"] == ("a", 1, {2: 3.5})
    found = resumed.go(steps[1])
    testing.assert_same_bits(expected, found, "losses and norms after the resume")
    testing.assert_same_bits(expected_end, resumed.outcome(), "parameters and states at the end")
    resumed.engine.close()
    gc.collect()


@drawn(
    12,
    shape=tiers.wide_shapes,
    precision=precisions,
    loop=loops,
    chunk_sizes=st.tuples(tiers.chunk_sizes, tiers.chunk_sizes),
    rooms=st.tuples(tiers.rooms, tiers.rooms),
    on_disk=st.sampled_from([(True, True), (True, False), (False, True)]),
    how=st.sampled_from(["wait", "beside", "beside, no room", "beside, lags"]),
    fast=2,
)
def test_states_on_disk(folder, shape, precision, loop, chunk_sizes, rooms, on_disk, how):
    if precision == "fp16":
        loop = {key: value for key, value in loop.items() if key != "update"}
    engines = []
    for uses_disk, room, size in zip(on_disk, rooms, chunk_sizes, strict=True):
        options = tiers.options(precision, size)
        if uses_disk:
            options = tiers.on_disk(shape.build, options, folder, batches(1)[0], room)
        hooks = {"page_bytes": tiers.PAGE_BYTES, "evict_everything": room.evict_everything}
        engines.append(functools.partial(engine_of, shape.build, options, **hooks))
    check_resume(folder / "run", *engines, (2, 2), how, **loop)
