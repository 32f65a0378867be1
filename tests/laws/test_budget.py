"""Law 2, budgets: at every moment, chunks on a tier fit in its budget minus its non-model data."""

import mmap
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probes import set_ram
from sampling import draws
from toys import Shape, batches, inputs, layers, train

import patrickstar as ps
from patrickstar._engine.engine import Engine
from patrickstar._layout.byte_size import parse_size
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.host_tier import HostTier
from patrickstar.errors import BudgetError
from patrickstar.testing import NoMeter

from .models import Waves, check_real_bytes, chunk_sizes, config, precisions, shapes, smallest_device_bytes


class WatchedHost(HostTier):
    """Host tier that checks the law at each allocation."""

    manager: "Watched"

    def allocate(self, chunk):
        host = super().allocate(chunk)
        self.check(chunk)
        return host

    def allocate_block(self, nbytes, *what):
        block = super().allocate_block(nbytes, *what)
        self.check()
        return block

    def check(self, *more):
        assert self.used + self.other_bytes <= self.budget_bytes
        check_real_bytes(self.manager, *more)


class Watched(ChunkManager):
    """Chunk manager that checks the law at each allocation."""

    def __init__(self, device, device_budget_bytes, host_budget_bytes, poison, **options):
        super().__init__(device, device_budget_bytes, host_budget_bytes, poison, **options)
        assert self.host_tier.used == self.host_tier.other_bytes == 0
        self.host_tier.__class__, self.host_tier.manager = WatchedHost, self
        allocate = self.device_tier.allocate
        self.device_tier.allocate = lambda chunk: (allocate(chunk), self.check(chunk))

    def check(self, allocated):
        device = self.device_tier
        assert device.used <= device.chunkable_bytes
        check_real_bytes(self, allocated)
        if device.page_pool is not None:
            pages = sum(mmap.PAGESIZE for chunk in self.chunks.values() if chunk.device_bytes)
            assert device.page_pool.mapped_bytes <= device.chunkable_bytes + pages + mmap.PAGESIZE


@settings(max_examples=draws(25), deadline=None, print_blob=True)
@given(shapes, chunk_sizes, precisions, st.integers(0, 16000), st.integers(0, 12000), st.integers(0, 8000))
def test_both_budgets_hold_at_every_moment(shape, chunk_size, precision, spare_bytes, wave_bytes, host_spare_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patrickstar._engine.core.ChunkManager", Watched)
        device = smallest_device_bytes(shape, chunk_size, precision) + spare_bytes + wave_bytes
        layout = Engine(shape.build, config(precision, chunk_size, device_memory=device)).layout
        host = layout.model_data_bytes + host_spare_bytes
        options = config(precision, chunk_size, device_memory=device, host_memory=host)
        engine = Engine(shape.build, options, meter=Waves(wave_bytes))
        train(engine, batches(3))
        assert engine.stats.total.device_peak_model_bytes <= device
        assert engine.stats.total.host_peak_model_bytes <= host
        engine.close()


def check_measured_process():
    """Train with the real meter and model data of four times the device budget."""
    width, budget = 1536, parse_size("112MiB")
    config = ps.Config(device="cpu", device_memory=budget, chunk_size="8MiB")
    engine, _ = ps.initialize(partial(layers, width, 16), config)
    assert engine.layout.model_data_bytes > 4 * budget
    for batch in inputs(3, width, rows=8):
        train(engine, [batch])
        last = engine.stats.last
        assert last.device_peak_model_bytes <= budget
        assert last.device_peak_non_model_bytes > 0
    assert engine.stats.total.evictions > 0
    engine.close()


def test_the_measured_process_stays_within_its_budget():
    """Use a separate process, without the memory of other tests."""
    program = (
        "from laws import test_budget as tests; import patrickstar._engine.core as core; "
        "core.ChunkManager = tests.Watched; tests.check_measured_process()"
    )
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=tests, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_model_that_cannot_fit_is_refused_in_bytes():
    shape = Shape(("mlp", "mlp"))
    total = Engine(shape.build, config("bf16", 256)).layout.model_data_bytes
    with pytest.raises(BudgetError, match=rf"{total} bytes.*smallest budgets that work.*host_memory="):
        Engine(shape.build, config("bf16", 256, device_memory=4096, host_memory=total // 2))


@settings(max_examples=draws(25), deadline=None, print_blob=True)
@given(shapes, st.sampled_from([64, 256, 700]), precisions, st.floats(0.05, 1.5))
def test_the_smallest_budgets_named_do_work(shape, chunk_size, precision, share):
    """Whatever device budget is asked for, a host of one byte is refused; train with what the error names."""
    layout = Engine(shape.build, config(precision, chunk_size)).layout
    device = max(1, int(share * layout.model_data_bytes))
    try:
        Engine(shape.build, config(precision, chunk_size, device_memory=device, host_memory=1), meter=NoMeter())
    except BudgetError as error:
        named = re.findall(r"device_memory=(\d+)|host_memory=(\d+)", str(error))
        (alone, _), (beside, _), (_, host) = named
        for budgets in ({"device_memory": int(alone), "host_memory": 1},
                        {"device_memory": int(beside), "host_memory": max(1, int(host))}):  # fmt: skip
            engine = Engine(shape.build, config(precision, chunk_size, **budgets), meter=NoMeter(), poison=True)
            train(engine, batches(3))
            engine.close()


def test_non_model_data_larger_than_the_budget_is_an_error_that_names_it():
    shape = Shape(("mlp",))
    engine = Engine(shape.build, config("bf16", 256, device_memory=8192), meter=Waves(20000))
    with pytest.raises(BudgetError, match=r"budget of 8192 bytes holds \d+ bytes of non-model data.*[Rr]aise"):
        train(engine, batches(2))
    engine.close()


def test_one_budget_that_leaves_nothing_for_the_other_is_refused(ram):
    for large, missing in (("host_memory", "device_memory"), ("device_memory", "host_memory")):
        expected = rf"{large} is \d+ bytes \(1000.00 GiB\), .* nothing is left for {missing}"
        with pytest.raises(BudgetError, match=expected):
            ps.initialize(lambda: layers(4, 1), ps.Config(device="cpu", **{large: "1000GiB"}))


def test_budgets_beyond_the_memory_of_the_machine_are_warned_of(ram):
    options = ps.Config(device="cpu", device_memory="600MiB", host_memory="600MiB")
    with pytest.warns(UserWarning, match=r"together may take \d+ bytes \(1.17 GiB\), and \d+ bytes \(1.00 GiB\)"):
        engine, _ = ps.initialize(lambda: layers(4, 1), options)
    engine.close()


@pytest.fixture
def ram(monkeypatch):
    """A machine with 1 GiB of memory available."""
    set_ram(monkeypatch, 1 << 30)
