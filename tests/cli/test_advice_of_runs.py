"""Advice of a report on real runs."""

from functools import partial
from pathlib import Path

import pytest
import torch
import toys
from torch import nn

import patrickstar as ps
from patrickstar._report.advice import advice
from patrickstar._report.run_file import Run, read_run
from patrickstar._report.stalls import named_stalls
from patrickstar.testing import NoMeter

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 256
DEVICE_BYTES = 1536 << 10
build = partial(toys.layers, WIDTH, 8, nn.GELU)


def recorded(log: Path, device_bytes: int) -> Run:
    """Train in bf16: 1 MiB of parameters, 6 MiB of masters and states, 16 KiB of activations per layer."""
    torch.manual_seed(0)
    config = ps.Config(device="cpu", chunk_size="128KiB", device_memory=device_bytes, host_memory="64MiB")
    with ps.Engine(build, config, meter=NoMeter()) as engine, engine.record(log):
        toys.train(engine, toys.inputs(4, WIDTH, rows=32))
    return read_run(log)


def test_every_recorded_step_has_advice(tmp_path: Path) -> None:
    run = recorded(tmp_path / "log.jsonl", DEVICE_BYTES)
    for timeline in run.timelines:
        sentences = advice(run, timeline, named_stalls(timeline, run.names))
        assert sentences and all(text.endswith(".") for text in sentences)
