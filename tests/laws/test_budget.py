"""Law 2, budgets: at every moment, chunks on a tier fit in its budget minus its non-model data and libraries."""

import mmap
import random
import re
from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from probes import after_allocations, set_ram
from sampling import drawn
from seeded import engine_of
from toys import Shape, batches, inputs, layers, mean_square, train, update
from transformers import LlamaConfig, LlamaForCausalLM

import patrickstar as ps
from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._dry_run.simulation import forward_backward_step, simulate
from patrickstar._engine import core
from patrickstar._layout.byte_size import parse_size
from patrickstar._perf_model.machine_spec import Gpu, Host, Links, Machine
from patrickstar._tiers.hardware import Hardware
from patrickstar._tiers.host_tier import HostTier
from patrickstar.errors import BudgetError
from patrickstar.testing import NoMeter, ReferenceTrainer, assert_same_bits

from .models import Fixed, Waves, check_real_bytes, chunk_sizes, config, precisions, shapes, smallest_device_bytes
from .tiers import run_elsewhere


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


@drawn(25, shapes, chunk_sizes, precisions, st.integers(0, 16000), st.integers(0, 12000), st.integers(0, 8000))
def test_both_budgets_hold_at_every_moment(shape, chunk_size, precision, spare_bytes, wave_bytes, host_spare_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patrickstar._engine.core.ChunkManager", Watched)
        device = smallest_device_bytes(shape, chunk_size, precision) + spare_bytes + wave_bytes
        layout = ps.Engine(shape.build, config(precision, chunk_size, device_memory=device)).layout
        host = layout.model_data_bytes + host_spare_bytes
        options = config(precision, chunk_size, device_memory=device, host_memory=host)
        engine = ps.Engine(shape.build, options, meter=Waves(wave_bytes))
        train(engine, batches(3))
        assert engine.stats.total.device_peak_model_bytes <= device
        assert engine.stats.total.host_peak_model_bytes <= host
        engine.close()


def check_measured_process():
    """Train with the real meter and model data of four times the device budget."""
    core.ChunkManager = Watched
    width, budget = 512, parse_size("10MiB")
    config = ps.Config(device="cpu", precision="fp32", device_memory=budget, chunk_size="1MiB")
    engine, _ = ps.initialize(partial(layers, width, 12), config)
    assert engine.layout.model_data_bytes > 4 * budget
    for batch in inputs(3, width, rows=8):
        train(engine, [batch])
        last = engine.stats.last
        assert last.device_peak_model_bytes <= budget
        assert last.device_peak_non_model_bytes > 0
    assert engine.stats.total.evictions > 0


def test_the_measured_process_stays_within_its_budget():
    """Use a separate process, without the memory of other tests."""
    run_elsewhere(check_measured_process)


@drawn(25, shapes, st.sampled_from([64, 256, 700]), precisions, st.floats(0.05, 1.5))
def test_the_smallest_budgets_named_do_work(shape, chunk_size, precision, share):
    """Whatever device budget is asked for, a host of one byte is refused; train with what the error names."""
    layout = ps.Engine(shape.build, config(precision, chunk_size)).layout
    device = max(1, int(share * layout.model_data_bytes))
    try:
        ps.Engine(shape.build, config(precision, chunk_size, device_memory=device, host_memory=1), meter=NoMeter())
    except BudgetError as error:
        (alone, _), (beside, _), (_, host) = re.findall(r"device_memory=(\d+)|host_memory=(\d+)", str(error))
        for device, other in ((alone, 1), (beside, max(1, int(host)))):
            options = config(precision, chunk_size, device_memory=int(device), host_memory=other)
            with engine_of(shape.build, options) as engine:
                train(engine, batches(3))


def test_non_model_data_larger_than_the_budget_is_an_error_that_names_it():
    engine = ps.Engine(Shape(("mlp",)).build, config("bf16", 256, device_memory=8192), meter=Fixed(20000))
    with pytest.raises(BudgetError, match=r"budget of 8192 bytes holds \d+ bytes of non-model data.*[Rr]aise"):
        train(engine, batches(2))


def test_budgets_beyond_the_memory_of_the_machine(monkeypatch):
    """One that leaves nothing for the other is refused, two that together exceed it are warned of."""
    set_ram(monkeypatch, 1 << 30)
    for large, missing in (("host_memory", "device_memory"), ("device_memory", "host_memory")):
        expected = rf"{large} is \d+ bytes \(1000.00 GiB\), .* nothing is left for {missing}"
        with pytest.raises(BudgetError, match=expected):
            ps.initialize(lambda: layers(4, 1), ps.Config(device="cpu", **{large: "1000GiB"}))
    options = ps.Config(device="cpu", device_memory="600MiB", host_memory="600MiB")
    with pytest.warns(UserWarning, match=r"together may take \d+ bytes \(1.17 GiB\), and \d+ bytes \(1.00 GiB\)"):
        ps.initialize(lambda: layers(4, 1), options)[0].close()


# Device memory used by libraries is counted before training and during training


WIDTH = 64
LIBRARY_BYTES = 1 << 20
CHUNK_BYTES = 2 * WIDTH * (WIDTH + 1)


class WithLibraries(Hardware):
    """CPU hardware that reports library workspaces on its device tier."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def library_bytes(self, dtype: torch.dtype, in_updates: bool = False) -> int:
        return LIBRARY_BYTES


build = partial(layers, WIDTH, 6)


def engine(**options) -> ps.Engine:
    config = ps.Config(device="cpu", **{"chunk_size": CHUNK_BYTES} | options)
    return ps.Engine(build, config, hardware=WithLibraries(), meter=Fixed(LIBRARY_BYTES), poison=True)


def train_watched(made: ps.Engine) -> None:
    used = []
    after_allocations(made, lambda chunk: used.append(made.inspect().device.chunk_bytes))
    train(made, inputs(3, WIDTH, rows=4))
    assert made.stats.last.device_peak_non_model_bytes == LIBRARY_BYTES
    assert max([0, *used]) + LIBRARY_BYTES <= made.device_budget_bytes


def test_a_budget_that_holds_the_model_but_not_the_libraries_is_refused():
    """The error before training names the libraries and the smallest budgets that work, and these work."""
    with pytest.raises(BudgetError) as refused:
        engine(device_memory=LIBRARY_BYTES, host_memory=1 << 30)
    text = str(refused.value)
    assert f"this device needs {LIBRARY_BYTES} bytes (1.00 MiB) more for its libraries (cuBLAS workspaces)" in text
    assert f"a device budget of {LIBRARY_BYTES} bytes" in text
    (least,) = re.findall(r"device_memory=(\d+) bytes .*with this host_memory", text)
    assert int(least) > LIBRARY_BYTES and refused.value.short_bytes == int(least) - LIBRARY_BYTES
    with pytest.raises(BudgetError):
        engine(device_memory=int(least) - 1, host_memory=1 << 30)
    train_watched(engine(device_memory=int(least), host_memory=1 << 30))


@pytest.mark.parametrize(("device_bytes", "host_bytes", "disk"), [(100, 1000, False), (0, "64KiB", True)])
def test_the_pair_of_budgets_in_the_error_works(device_bytes, host_bytes, disk, tmp_path):
    options = {"disk": tmp_path} if disk else {}
    with pytest.raises(BudgetError) as refused:
        engine(device_memory=LIBRARY_BYTES + device_bytes, host_memory=host_bytes, **options)
    text = str(refused.value).partition("Required")[2] if disk else str(refused.value)
    ((device, host),) = re.findall(r"device_memory=(\d+)[^=]* host_memory=(\d+) bytes", text)
    with engine(device_memory=int(device), host_memory=int(host), **options) as made:
        train_watched(made)


def test_the_chunk_size_fits_the_memory_left_by_libraries_if_a_meter_reports_them():
    with engine(chunk_size="auto", device_memory=LIBRARY_BYTES + 40_000, host_memory="1GiB") as made:
        assert max(chunk.compute_bytes for chunk in made.layout.chunks) <= 40_000 // 4
    config = ps.Config(device="cpu", chunk_size=CHUNK_BYTES, device_memory="64KiB", host_memory="1GiB")
    ps.Engine(build, config, hardware=WithLibraries(), meter=NoMeter()).close()


def test_a_dry_run_counts_libraries():
    machine = Machine(
        name="a test's",
        source="a test",
        gpu=Gpu(count=1, memory=LIBRARY_BYTES + (1 << 18), matmul_tflops=1.0, memory_bandwidth=1e9),
        host=Host(memory=1 << 30, memory_bandwidth=1e9, cores=1),
        links=Links(h2d=1e9, d2h=1e9),
    )
    config = ps.Config(device="cpu", chunk_size=CHUNK_BYTES)
    step = forward_backward_step(mean_square, (torch.zeros(4, WIDTH),), {})
    reports = [simulate(ps.Engine, build, config, step, machine, library_bytes=n) for n in (0, LIBRARY_BYTES)]
    peaks = [report.stats.device_peak_non_model_bytes for report in reports]
    assert abs(peaks[1] - peaks[0] - LIBRARY_BYTES) < 4096, "only transfers in flight may differ otherwise"
    with pytest.raises(BudgetError, match=r"for its libraries"):
        small = machine.model_copy(update={"gpu": machine.gpu.model_copy(update={"memory": LIBRARY_BYTES})})
        simulate(ps.Engine, build, config, step, small, library_bytes=LIBRARY_BYTES)


VOCABULARY = 256


def llama():
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=128, vocab_size=VOCABULARY, use_cache=False, **heads)
    ).train()


def batch(length, seed):
    ids = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def train_lengths(trainer, lengths):
    for seed, length in enumerate(lengths):
        update(trainer, trainer(**batch(length, seed)).loss)


@pytest.mark.parametrize("planned", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_many_lengths(count, planned):
    """Train in a budget that does not hold all parameters beside the longest batch; compare with plain PyTorch."""
    choice, lengths = random.Random(count), [*range(8, 8 + count)]
    lengths += lengths if count == 16 else [choice.randrange(8, 72) for _ in range(436)]
    choice.shuffle(lengths)
    device_memory = "1600KiB" if count == 16 else "4MiB"
    config = ps.Config(device="cpu", precision="fp32", device_memory=device_memory, host_memory="16MiB")
    engine, _ = ps.initialize(llama, config, sample=batch(max(lengths), 0))
    if planned:
        engine.plan(**batch(max(lengths), 0))
    train_lengths(engine, lengths)
    train_lengths(reference := ReferenceTrainer(llama, config), lengths)
    assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters")
    assert engine.stats.total.evictions > 0, "the budget holds everything, so that nothing was tested"
