"""Records of steps: they change nothing, and their bytes, waits and memory are those of the step's statistics."""

import json
import math
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from probes import manager_of
from toys import train

import patrickstar as ps
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.step_timeline import Channel, StepTimeline
from patrickstar.errors import ConfigError, TrainingError

from .tiers import Room, blocks, inputs, on_disk, options, small_engine

STEPS = 9
RECORDED = [1, 2, 4, 8]
BATCHES = inputs(STEPS)


def engine_on(tier: str, folder) -> ps.Engine:
    """Return an engine whose model fits, or lies on the host or on a disk."""
    if tier == "disk":
        return small_engine(blocks, on_disk(blocks, options(), folder, BATCHES[0], Room(host_bytes=30000)))
    budget = 60_000 if tier == "host" else "1GiB"
    return small_engine(blocks, options(device_memory=budget, host_memory="1MiB"))


def step(engine: ps.Engine, number: int) -> list[torch.Tensor]:
    return train(engine, [BATCHES[number]], max_norm=1.0)


def memory_of(timeline: StepTimeline, tier: Tier) -> list[int]:
    """Return the bytes of chunks on a tier after each change, from the start of the step on."""
    used = sum(each.nbytes for each in timeline.initial if each.tier is tier)
    values = [used]
    for each in timeline.residency:
        if each.tier is tier:
            used += each.nbytes if each.present else -each.nbytes
            values.append(used)
    return values


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_record_changes_nothing_and_agrees_with_the_statistics(tmp_path, tier):
    losses, stats, states, used = [], [], [], []
    for records in (False, True):
        with engine_on(tier, tmp_path) as engine, engine.record() if records else nullcontext() as recording:
            manager = manager_of(engine)
            for number in range(STEPS):
                losses.append(step(engine, number))
                stats.append(engine.stats.last)
                used.append((manager.device_tier.used, manager.host_tier.used))
            states.append(engine.state_dict())
    ps.testing.assert_same_bits(*states, "parameters")
    ps.testing.assert_same_bits(losses[:STEPS], losses[STEPS:], "losses")
    plain_stats, stats, used = stats[:STEPS], stats[STEPS:], used[STEPS:]
    assert [each.step for each in recording.timelines] == RECORDED
    for name in ("h2d_bytes", "d2h_bytes", "evictions", "device_peak_model_bytes"):
        assert [getattr(each, name) for each in plain_stats] == [getattr(each, name) for each in stats]
    for timeline in recording.timelines:
        assert StepTimeline.of_json(json.loads(json.dumps(timeline.as_json()))).as_json() == timeline.as_json()
        last = stats[timeline.step - 1]
        moved = Counter()
        for work in timeline.work:
            assert work.asked_s <= work.start_s <= work.end_s <= timeline.end_s
            moved[work.channel] += work.nbytes
        # The rest are gradients and parameters of updates on the host, which their kernel reads and writes in place,
        # and chunks that go to the disk and back.
        rest = last.h2d_bytes - moved[Channel.TO_DEVICE], last.d2h_bytes - moved[Channel.TO_HOST]
        assert min(rest) >= 0 and (tier == "disk" or rest[0] == rest[1]) and (tier != "device" or rest == (0, 0))
        if timeline.step > 1:  # the first one's statistics contain the engine's construction
            assert math.isclose(sum(each.end_s - each.start_s for each in timeline.stalls), last.stall_s, abs_tol=1e-9)
        on_device = memory_of(timeline, Tier.DEVICE)
        assert (on_device[-1], max(on_device)) == (used[timeline.step - 1][0], last.device_peak_model_bytes)
        on_host = memory_of(timeline, Tier.HOST)
        assert (on_host[-1], max(on_host)) == (used[timeline.step - 1][1], last.host_peak_model_bytes)
        assert [name for _, name in timeline.phases] == ["forward", "backward", "step", ""]
        assert all(before <= after for (before, _), (after, _) in pairwise(timeline.phases))
        assert moved[Channel.UPDATE] > 0 or tier == "disk"  # whose updates may run in the next step
    assert any(timeline.moments for timeline in recording.timelines)


def test_all_disk_bytes_are_recorded(tmp_path):
    """Transfers that are in flight when a recorded step ends belong to none: with one step after the other, to none."""
    with engine_on("disk", tmp_path) as engine, engine.record() as recording:
        train(engine, BATCHES[:4], max_norm=1.0)
        for channel, nbytes in (
            (Channel.DISK_WRITE, engine.stats.last.disk_write_bytes),
            (Channel.DISK_READ, engine.stats.last.disk_read_bytes),
        ):
            recorded = sum(work.nbytes for work in recording.timelines[2].work if work.channel is channel)
            assert 0 < recorded <= 2 * nbytes, channel
        assert all(nbytes == engine.stats.last.disk_bytes for _, nbytes in recording.timelines[2].disk)


def test_gradients_take_the_place_of_parameters(tmp_path):
    """Each chunk of parameters holds gradients once, from backward to its update."""
    with engine_on("host", tmp_path) as engine:
        with engine.record() as recording:
            step(engine, 0)
        assert manager_of(engine).timeline is None
    (timeline,) = recording.timelines
    (_, forward), (backward_s, backward), (step_s, _), _ = timeline.phases
    assert (forward, backward) == ("forward", "backward")
    chunks = {index for _, index, _ in timeline.gradients}
    for value in (True, False):
        assert sorted(index for _, index, holds in timeline.gradients if holds is value) == sorted(chunks)
    assert all(backward_s < at_s for at_s, _, holds in timeline.gradients if holds)
    assert all(step_s < at_s for at_s, _, holds in timeline.gradients if not holds)


def test_chrome_trace(tmp_path):
    """Rows have no overlapping works, names are those of parameters, and times are those of torch.profiler."""
    with engine_on("disk", tmp_path) as engine:
        with engine.record():  # the first one in a process measures the rate of products
            pass
        with torch.profiler.profile() as profiler, engine.record() as recording:
            step(engine, 0)
            step(engine, 1)
        profiler.export_chrome_trace(str(tmp_path / "profile.json"))
        recording.chrome_trace(tmp_path / "trace.json", tmp_path / "profile.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    own = [event for event in trace["traceEvents"] if event["pid"] == "PatrickStar"]
    rows = {event["tid"]: event["args"]["name"] for event in own if event["name"] == "thread_name"}
    assert {"phases", "stalls", "disk read", "disk write", "update on the host"} <= set(rows.values())
    for row, name in rows.items():
        if name in ("stalls", "update on the host"):  # a wait may contain another
            continue
        spans = sorted(
            (event["ts"], event["ts"] + event["dur"]) for event in own if event.get("tid") == row and "dur" in event
        )
        assert all(before[1] <= after[0] + 0.01 for before, after in pairwise(spans)), name
    assert any(event["name"].endswith("(0.0.weight)") for event in own), {event["name"] for event in own}
    profiled = [event["ts"] for event in trace["traceEvents"] if event["name"] == "aten::mm"]
    phases = [event for event in own if event.get("tid") == 0 and "dur" in event]
    begin, end = phases[0]["ts"], phases[-1]["ts"] + phases[-1]["dur"]
    inside = [ts for ts in profiled if begin <= ts <= end]
    assert profiled and len(inside) == len(profiled)


def test_mistakes(tmp_path):
    engine = engine_on("device", tmp_path)
    with engine.record() as recording:
        with pytest.raises(TrainingError, match="is being recorded already"), engine.record():
            pass
        step(engine, 0)
    with pytest.raises(ConfigError, match=r"the trace .*missing/trace.json can't be written"):
        recording.chrome_trace(tmp_path / "missing" / "trace.json")
    with pytest.raises(ConfigError, match=r"is no trace of torch.profiler that can be read"):
        recording.chrome_trace(tmp_path / "trace.json", tmp_path / "missing.json")
    with pytest.raises(RuntimeError, match="in the middle"), engine.record():
        raise RuntimeError("in the middle")
    assert manager_of(engine).timeline is None
    with engine.record():
        step(engine, 1)
        engine.close()
    with pytest.raises(TrainingError, match="closed"), engine.record():
        pass
