"""Checkpoints written beside training on the strict device."""

import os
import time
from collections.abc import Callable
from functools import cache
from unittest import mock

import pytest
import strict_device
import torch
import toys
from probes import manager_of
from sampling import draws
from seeded import assert_same_model, engine_of, run_step
from torch import nn

import patrickstar as ps
from patrickstar._checkpoint import direct_writer
from patrickstar._checkpoint.direct_writer import DirectWriter
from patrickstar._hardware.job_queue import Job
from patrickstar._hardware.worker_pool import WorkerPool

WIDTH = 64
PAGE_BYTES = 4096


class Counted(nn.Module):
    """Module with a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(PAGE_BYTES))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return value


def build() -> nn.Module:
    return nn.Sequential(Counted(), toys.layers(WIDTH, 6, nn.GELU))


def new_engine(device_memory: str, model: Callable[[], nn.Module] = build) -> ps.Engine:
    config = ps.Config(device="strict", chunk_size="18KiB", device_memory=device_memory, host_memory="8MiB")
    return engine_of(model, config, page_bytes=PAGE_BYTES)


@pytest.fixture
def late_writes(monkeypatch):
    """Let each job of a worker begin late, when others may have changed what it reads."""
    submit = WorkerPool.submit

    def late(job: Job) -> Job:
        def run(stage: torch.Tensor) -> None:
            time.sleep(0.02)
            job(stage)

        return run

    monkeypatch.setattr(
        WorkerPool, "submit", lambda pool, jobs, *args, **options: submit(pool, [*map(late, jobs)], *args, **options)
    )


@cache
def batch() -> tuple[torch.Tensor]:
    return (toys.inputs(1, width=WIDTH, rows=32)[0][0].to("strict"),)


def train(engine: ps.Engine, steps: int) -> None:
    """Train without a wait for the device."""
    for _ in range(steps):
        run_step(engine, batch())


@pytest.mark.parametrize("seed", range(draws(10)))
@pytest.mark.parametrize("device_memory", ["16MiB", "160KiB"])
def test_a_checkpoint_holds_the_step_before_it(tmp_path, late_writes, device_memory, seed):
    """States are on the device with the larger budget, and on the host with the smaller one."""
    strict_device.configure(seed=seed)
    engine, expected, loaded = (new_engine(device_memory) for _ in range(3))
    train(engine, 2)
    tiers = {param.optimizer_tier for param in engine.inspect().parameters}
    assert tiers == {"device" if device_memory == "16MiB" else "host"}
    engine.save(tmp_path / "checkpoint", wait=False)
    train(engine, 2)
    engine.close()
    train(expected, 2)
    loaded.load(tmp_path / "checkpoint")
    assert_same_model(expected, loaded)


@pytest.mark.parametrize("seed", range(draws(10)))
@pytest.mark.parametrize("device_memory", ["16MiB", "160KiB"])
def test_a_state_that_is_loaded_beside_a_save_is_not_in_it(tmp_path, late_writes, device_memory, seed):
    strict_device.configure(seed=seed)
    engine, expected, loaded = (new_engine(device_memory) for _ in range(3))
    train(engine, 2)
    other = {name: value + 1 for name, value in engine.state_dict().items()}
    engine.save(tmp_path / "checkpoint", wait=False)
    engine.load_state_dict(other)
    engine.close()
    train(expected, 2)
    loaded.load(tmp_path / "checkpoint")
    assert_same_model(expected, loaded)


def test_a_save_that_is_waited_for_is_complete(tmp_path, monkeypatch):
    engine, sync = new_engine("16MiB"), os.fsync

    def slow_sync(descriptor: int) -> None:
        time.sleep(0.2)
        sync(descriptor)

    monkeypatch.setattr(direct_writer.os, "fsync", slow_sync)
    engine.save(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint").exists()


def test_states_that_are_being_saved_are_released_before_their_update(tmp_path, monkeypatch):
    engine = new_engine("16MiB")
    train(engine, 2)
    engine.save(tmp_path / "checkpoint", wait=False)
    release = mock.Mock(wraps=DirectWriter.release)
    monkeypatch.setattr(DirectWriter, "release", lambda writer, owner: release(writer, owner))
    train(engine, 1)
    released = {call.args[1] for call in release.call_args_list}
    assert released >= {chunk for chunk in manager_of(engine).chunks.values() if chunk.kind.startswith("exp_avg")}


@pytest.mark.parametrize("device_memory", ["16MiB", "160KiB"])
def test_a_step_beside_a_save_does_not_wait_for_the_device(tmp_path, device_memory):
    strict_device.configure(seed=1)
    engine = new_engine(device_memory)
    train(engine, 5)
    engine.save(tmp_path / "checkpoint", wait=False)
    torch.accelerator.synchronize()
    strict_device.extension.reset_host_waits()
    train(engine, 1)
    assert strict_device.extension.host_waits() == {"event": 0, "stream": 0, "copy": 0, "op": 0}


def build_frozen() -> nn.Module:
    return build().requires_grad_(False)


@pytest.mark.parametrize("seed", range(draws(10)))
@pytest.mark.parametrize("device_memory", ["16MiB", "160KiB"])
def test_frozen_parameters_may_be_written_beside_a_save(tmp_path, late_writes, device_memory, seed):
    """They are on the device with the larger budget, and on the host with the smaller one."""
    strict_device.configure(seed=seed)
    engine, expected, loaded = (new_engine(device_memory, build_frozen) for _ in range(3))
    with torch.no_grad():
        for _ in range(2):
            engine(*batch())
            expected(*batch())
        engine.save(tmp_path / "checkpoint", wait=False)
        for param in engine.module.parameters():
            param.add_(1)
            param.sum().item()  # the device has written it
    engine.close()
    loaded.load(tmp_path / "checkpoint")
    assert_same_model(expected, loaded)


@pytest.mark.parametrize("seed", range(draws(10)))
@pytest.mark.parametrize("device_memory", ["16MiB", "160KiB"])
def test_frozen_parameters_may_be_trained_beside_a_save(tmp_path, late_writes, device_memory, seed):
    strict_device.configure(seed=seed)

    def half_frozen() -> nn.Module:
        module = build()
        module[1][0].requires_grad_(False)
        return module

    engine, expected, loaded = (new_engine(device_memory, half_frozen) for _ in range(3))
    train(engine, 2)
    engine.save(tmp_path / "checkpoint", wait=False)
    engine.module.requires_grad_(True)
    train(engine, 2)
    engine.close()
    train(expected, 2)
    loaded.load(tmp_path / "checkpoint")
    assert_same_model(expected, loaded)
