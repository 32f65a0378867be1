"""An engine shows its state in snapshots of `engine.inspect()`, its work in the profiler, and tells of it in a log."""

import json
import logging
from dataclasses import FrozenInstanceError, asdict
from functools import partial

import pytest
import torch
from seeded import engine_of, run_step
from torch import nn
from torch.profiler import ProfilerActivity, profile
from toys import layers

import patrickstar as ps

WIDTH = 64


def build() -> nn.Module:
    model = layers(WIDTH, 12)
    model[0].requires_grad_(False)
    return model


def engine_with(**options) -> ps.Engine:
    return engine_of(build, ps.Config(device="cpu", chunk_size=8448, **options), page_bytes=4096)


def backward(engine: ps.Engine) -> None:
    engine.backward(engine(torch.ones(4, WIDTH)).float().pow(2).mean())


def test_parameters_and_chunks_agree_with_the_layout_and_with_one_another():
    with engine_with() as engine:
        state = engine.inspect()
        assert [param.name for param in state.parameters] == [name for name, _ in engine.module.named_parameters()]
        for param, (_, plain) in zip(state.parameters, build().named_parameters(), strict=True):
            kinds = {chunk.kind for chunk in state.chunks if chunk.index == param.chunk}
            assert (param.shape, param.numel, param.dtype) == (plain.shape, plain.numel(), "bfloat16")
            assert param.trained is plain.requires_grad
            assert kinds == ({"param16", "param32", "exp_avg", "exp_avg_sq"} if param.trained else {"param16"})
            assert param.optimizer_tier == ("host" if param.trained else None)
            assert (param.state, param.steps, param.has_gradient) == ("HOLD", 0, False)
        kinds = dict.fromkeys(("param32", "exp_avg", "exp_avg_sq"), "float32") | {"param16": "bfloat16"}
        assert {(chunk.kind, chunk.dtype) for chunk in state.chunks} == kinds.items()
        assert sum(chunk.nbytes for chunk in state.chunks) == engine.layout.model_data_bytes
        for tier, usage in (("device", state.device), ("host", state.host)):
            assert sum(chunk.nbytes for chunk in state.chunks if tier in chunk.tiers) == usage.chunk_bytes
        assert state.device.budget_bytes == engine.device_budget_bytes
        assert state.host.budget_bytes == engine.host_budget_bytes
        assert state.disk is None and state.loss_scale == 1.0
        assert {chunk.state for chunk in state.chunks} == {"HOLD", None}
        backward(engine)
        first = engine.inspect()
        frozen = {param.chunk for param in first.parameters if not param.trained}
        for chunk in first.chunks:
            of_params = "HOLD" if chunk.index in frozen else "HOLD_AFTER_BWD"
            assert chunk.state == (of_params if chunk.kind == "param16" else None)
        # Snapshots are plain, and reading changes nothing.
        assert engine.inspect() == first
        json.dumps(asdict(first))
        with pytest.raises(FrozenInstanceError):
            first.parameters[0].steps = 1
        engine.optimizer.step()
        assert engine.inspect() != first and first.parameters[2].steps == 0


def test_a_step_as_inspections_show_it():
    running = []
    with engine_with(device_memory="24KiB") as engine:
        engine.module[5].register_forward_hook(lambda *_: running.append(engine.inspect()))
        backward(engine)
        waiting = engine.inspect()
        assert running[0].parameters[10].state == "HOLD_AFTER_FWD"
        assert all(param.has_gradient == param.trained for param in waiting.parameters)
        assert {param.state for param in waiting.parameters if param.trained} == {"HOLD_AFTER_BWD"}
        engine.optimizer.step()
        after = engine.inspect()
        assert not any(param.has_gradient for param in after.parameters)
        assert {param.steps for param in after.parameters} == {0, 1}
        accesses = [moment.chunks for moment in after.trace if moment.chunks]
        assert {index for chunks in accesses for index in chunks} == {param.chunk for param in after.parameters}
        total = engine.stats.total
        assert (after.h2d_bytes, after.d2h_bytes) == (total.h2d_bytes, total.d2h_bytes)
        assert after.h2d_bytes > 0


def test_the_window_of_a_backward():
    open_windows = []
    with engine_with(precision="fp16") as engine:
        assert engine.inspect().loss_scale == 2.0**16
        out = engine(torch.ones(4, WIDTH))
        out.register_hook(lambda _: open_windows.append(engine.inspect().window_open))
        engine.module[3].weight.register_hook(lambda _: open_windows.append(engine.inspect().window_open))
        engine.backward(out.float().pow(2).mean())
        assert open_windows == [False, True] and not engine.inspect().window_open


def test_a_disk_updates_from_it_and_a_closed_engine(tmp_path):
    with engine_with(device_memory="24KiB", host_memory="140KiB", disk=ps.Disk(tmp_path)) as engine:
        for _ in range(2):
            backward(engine)
            engine.optimizer.step()
        state = engine.inspect()
        assert state.disk.path.parent == tmp_path and 0 < state.disk.used_bytes <= state.disk.nbytes
        assert {param.optimizer_tier for param in state.parameters} >= {None, "disk"}
        assert any("disk" in chunk.tiers for chunk in state.chunks)
        pending = [param for param in state.parameters if param.update_pending]
        assert pending and all(param.optimizer_tier == "disk" for param in pending)
        engine.state_dict()
        assert not any(param.update_pending for param in engine.inspect().parameters)
        assert engine.inspect().disk_read_bytes > 0 and engine.inspect().disk_write_bytes > 0
    state = engine.inspect()
    assert state.chunks == state.parameters == ()
    assert state.device.chunk_bytes == state.host.chunk_bytes == 0
    assert state.disk.nbytes == state.disk.used_bytes == 0


def engine_of_layers() -> ps.Engine:
    """Return an engine over four layers that evicts whatever it may at every access."""
    config = ps.Config(device="cpu", precision="fp32", chunk_size=1024, optimizer=ps.AdamW(lr=1e-3))
    return engine_of(partial(layers, 16, 4), config, evict_everything=True)


step = partial(run_step, batch=(torch.ones(2, 16),))


def test_a_profile_names_the_work_of_a_step(one_thread, tmp_path):
    engine = engine_of_layers()
    step(engine)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step(engine)
        engine.save(tmp_path / "checkpoint")
    names = {event.name for event in profiled.events() if event.name.startswith("patrickstar::")}
    assert {"patrickstar::access 0.weight, 0.bias", "patrickstar::fetch param16[0]"} <= names
    for work in ("evict param16", "update 0.", "save model.0.weight"):
        assert any(name.startswith(f"patrickstar::{work}") for name in names), f"{work!r} is not among {sorted(names)}"
    engine.close()


def test_the_log_tells_of_traces_plans_and_evictions(one_thread, caplog):
    caplog.set_level(logging.DEBUG, logger="patrickstar")
    engine = engine_of_layers()
    step(engine)
    messages = [record.getMessage() for record in caplog.records]
    assert sum(message.startswith("tracing an iteration") for message in messages) == 1
    assert any(message.startswith("plan: optimizer chunks") for message in messages)
    assert any(message.startswith("evicted param16[0]") for message in messages)
    assert all(record.name.startswith("patrickstar.") and record.levelno < logging.WARNING for record in caplog.records)
    caplog.clear()
    step(engine)
    assert not any("tracing" in record.getMessage() for record in caplog.records), "the second step follows the trace"
    engine.module[1].forward = engine.module[0].forward
    step(engine)
    dropped = [record.getMessage() for record in caplog.records if "trace dropped" in record.getMessage()]
    assert len(dropped) == 1 and "unlike the trace" in dropped[0]
    engine.close()
    assert all(record.levelno < logging.WARNING for record in caplog.records)
