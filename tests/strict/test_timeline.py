"""Records of steps beside an accelerator: copies and the device's waits have times of its events."""

from collections import Counter
from contextlib import nullcontext

import strict_device
import torch
import toys
from seeded import engine_of
from torch import nn

import patrickstar as ps
from patrickstar._hardware.accelerator import DeviceClock
from patrickstar._schedule.step_timeline import Channel
from patrickstar._tiers.hardware import Hardware

WIDTH = 64
STEPS = 8


def test_copies_are_timed_by_the_device():
    """Every byte that is copied is in a work with begin and end, and recording changes no loss."""
    data = [(batch.to("strict"),) for (batch,) in toys.inputs(STEPS, width=WIDTH, rows=32)]
    losses = []
    for records in (False, True):
        strict_device.configure(seed=1)
        config = ps.Config(device="strict", chunk_size="18KiB", device_memory="60KiB", host_memory="8MiB")
        engine = engine_of(lambda: toys.layers(WIDTH, 8, nn.GELU), config)
        with engine.record() if records else nullcontext() as recording:
            losses.append(toys.train(engine, data))
        engine.close()
    assert losses[0] == losses[1]
    assert [each.step for each in recording.timelines] == [1, 2, 4, 8]
    for timeline in recording.timelines:
        moved = Counter()
        for work in timeline.work:
            moved[work.channel] += work.nbytes
            assert work.start_s <= work.end_s <= timeline.end_s
            if work.channel is not Channel.UPDATE:
                assert timeline.start_s <= work.start_s
        assert min(moved[Channel.TO_DEVICE], moved[Channel.TO_HOST]) > 0
        assert all(stall.start_s <= stall.end_s <= timeline.end_s for stall in timeline.stalls)
        assert any(stall.label.startswith("param16[") for stall in timeline.stalls)
    # An update may run in the next step, which may have no timeline.
    assert any(work.channel is Channel.UPDATE for timeline in recording.timelines for work in timeline.work)


def test_the_clock_of_the_device_begins_once_its_event_has_passed(monkeypatch):
    accelerator, events = Hardware(torch.device("strict", 0)).accelerator, []
    assert accelerator is not None
    record = accelerator.record
    monkeypatch.setattr(accelerator, "record", lambda **options: events.append(record(**options)) or events[-1])
    for seed in range(8):
        strict_device.configure(seed=seed)
        torch.ones(1 << 12, device="strict").add_(1)
        assert DeviceClock(accelerator, lambda: float(events[-1].query()))._start_s == 1.0
