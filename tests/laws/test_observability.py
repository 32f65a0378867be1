"""The profiler shows the engine's work by chunk and parameter; the log tells of traces, plans and evictions."""

import logging
from functools import partial

import torch
from seeded import engine_of, run_step
from torch.profiler import ProfilerActivity, profile
from toys import layers

import patrickstar as ps
from patrickstar._engine.engine import Engine


def engine_of_layers() -> Engine:
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
