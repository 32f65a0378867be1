"""Advice of a report on real runs: what it says about memory is what happens with that memory."""

from dataclasses import replace
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
from patrickstar._report.step_model import StepModel
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


def moved_bytes(run: Run) -> int:
    return run.steps[-1]["h2d_bytes"] + run.steps[-1]["d2h_bytes"]


def test_the_memory_that_is_lacking_saves_all_transfers(tmp_path: Path) -> None:
    run = recorded(tmp_path / "log.jsonl", DEVICE_BYTES)
    timeline = next(each for each in run.timelines if each.step == 2)
    # A step that takes long, so that the model describes it whatever the speed of this machine was.
    timeline = replace(timeline, end_s=timeline.end_s + 10.0)
    model = StepModel.of(run, timeline, named_stalls(timeline, run.names))
    assert model.params * 2 == sum(nbytes for kind, _, nbytes in run.description["chunks"] if kind == "param16")
    extra = model.lacking_device_bytes
    assert extra > 0 and model.with_memory(device_bytes=extra).seconds() < model.seconds()
    assert moved_bytes(run) > 0
    half = recorded(tmp_path / "half.jsonl", DEVICE_BYTES + extra // 2)
    # Room for the copy of a chunk more: the estimate is of bytes, not of whole chunks.
    whole = recorded(tmp_path / "whole.jsonl", DEVICE_BYTES + extra + (1 << 20))
    assert moved_bytes(run) > moved_bytes(half) > moved_bytes(whole) == 0


def test_every_recorded_step_has_advice(tmp_path: Path) -> None:
    run = recorded(tmp_path / "log.jsonl", DEVICE_BYTES)
    for timeline in run.timelines:
        sentences = advice(run, timeline, named_stalls(timeline, run.names))
        assert sentences and all(text.endswith(".") for text in sentences)
