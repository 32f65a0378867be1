"""Law: with open budgets no more is page-locked than the model data, buffers and what speculation can use."""

import random
from functools import partial
from itertools import accumulate

import pytest
import strict_device
import torch
from probes import manager_of, set_ram
from sampling import draws
from seeded import engine_of, run_step
from torch import nn
from toys import inputs, layers, mean_square

import patrickstar as ps
from patrickstar._params.state_dict import replace_data
from patrickstar._step.streamed_update import BUFFERS, PIECE_NUMEL, WHOLE_BUFFERS, buffer_bytes
from patrickstar._tiers.host_arena import ALIGN_BYTES

RAM_BYTES = 1 << 33
OPTIMIZERS = ps.AdamW(lr=1e-2), ps.EMA(ps.AdamW(lr=1e-2), decay=0.9), ps.SGD(lr=1e-2), ps.Lion(lr=1e-3)
STEPS = 6


@pytest.fixture
def locked(monkeypatch) -> list[int]:
    """Bytes of each call that page-locks host memory, on a machine of 8 GiB."""
    calls: list[int] = []
    page_lock = strict_device.StrictAccelerator.page_lock

    def counted(self, address: int, nbytes: int) -> list[int]:
        calls.append(nbytes)
        return page_lock(self, address, nbytes)

    monkeypatch.setattr(strict_device.StrictAccelerator, "page_lock", counted)
    set_ram(monkeypatch, RAM_BYTES)
    return calls


def speculation_bytes(engine: ps.Engine) -> int:
    """Return the bytes of the chunks that belong to an index whose masters and states are all on the host."""
    chunks: dict[int, list] = {}
    for (_, index), chunk in manager_of(engine).chunks.items():
        chunks.setdefault(index, []).append(chunk)
    states = {index: [chunk for chunk in each if chunk.kind != "param16"] for index, each in chunks.items()}
    on_host = [index for index, each in states.items() if all(chunk.host.present for chunk in each)]
    return sum(chunk.nbytes for index in on_host for chunk in chunks[index])


@pytest.mark.parametrize("seed", range(draws(40)))
def test_page_locked_bytes_are_those_of_the_model_and_of_speculation(seed, locked):
    choice = random.Random(seed)
    strict_device.configure(seed=seed)
    width, count = choice.choice([40, 64, 96]), choice.randint(3, 9)
    param_bytes = 2 * count * width * (width + 1)
    config = ps.Config(
        device="strict",
        precision=choice.choice(["bf16", "fp32"]),
        chunk_size=choice.choice(["3KiB", "12KiB", "auto"]),
        device_memory=int(param_bytes * choice.choice([1.5, 2, 3])) + (32 << 10),
        optimizer=choice.choice(OPTIMIZERS),
    )
    with engine_of(partial(layers, width, count), config) as engine:
        assert engine.host_budget_bytes == RAM_BYTES - RAM_BYTES // 10
        buffers = buffer_bytes(width * width, 4, by_pages=True) + BUFFERS * ALIGN_BYTES
        (at_start,) = locked
        assert at_start <= engine.layout.model_data_bytes + buffers
        use_bytes = [speculation_bytes(engine)]
        for (batch,) in inputs(STEPS, width=width):
            engine.backward(mean_square(engine(batch)))
            engine.clip_grad_norm_(1e9)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            use_bytes.append(speculation_bytes(engine))
        pieces = locked[1:]
        assert sum(pieces) <= max(use_bytes), f"seed {seed}"
        asked_bytes = engine.stats.total.host_peak_speculative_bytes
        assert all(before <= 2 * asked_bytes for before in list(accumulate(pieces))[:-1]), f"seed {seed}"
        if asked_bytes:
            assert engine.stats.total.speculation_hits > 0, f"seed {seed}"


def test_buffers_hold_no_embedding_of_which_updates_are_cut(locked):
    """Muon updates whole matrices, of which the buffers hold three; AdamW updates the embedding by pieces."""
    config = ps.Config(device="strict", precision="bf16", device_memory="8MiB", optimizer=ps.Muon())
    build = lambda: nn.Sequential(nn.Embedding(40_000, 64), nn.Linear(64, 64), nn.Linear(64, 64))  # noqa: E731
    with engine_of(build, config) as engine:
        assert locked[0] - engine.layout.model_data_bytes <= WHOLE_BUFFERS * (2 * PIECE_NUMEL + ALIGN_BYTES)
        engine.backward(mean_square(engine(torch.arange(10))))
        engine.optimizer.step()


@pytest.mark.parametrize("device", ["strict", "cpu"])
def test_closing_takes_no_more_host_memory_than_training_did(device, monkeypatch):
    """Plain parameters are in full precision: memory of the states is returned before they take theirs."""
    config = ps.Config(device=device, chunk_size="12KiB", device_memory="64KiB", host_memory="8MiB")
    with engine_of(partial(layers, 64, 24), config) as engine:
        for (batch,) in inputs(2, width=64):
            run_step(engine, (batch,))
        host_tier = manager_of(engine).host_tier
        before, plain_bytes = host_tier.touched_bytes, []
        plain = replace_data

        def replaced(param, value):
            plain_bytes.append(value.nbytes)
            assert host_tier.touched_bytes + sum(plain_bytes) <= before
            plain(param, value)

        monkeypatch.setattr("patrickstar._params.state_dict.replace_data", replaced)
        engine.close()
        assert sum(plain_bytes) == 4 * engine.layout.numel
