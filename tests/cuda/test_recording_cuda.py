"""Records of steps on a device change no bit, agree with the statistics and the budgets, and make a page."""

import json
import math
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from cuda_cases import DEVICE, HAS_ACCELERATOR, budget, inputs, layers, make_engine, marks
from toys import outcome, train

import patrickstar as ps
from patrickstar import StepStats
from patrickstar._report.memory_curves import GRADIENTS, PARAMETERS, STATES, memory_curves
from patrickstar._report.page import PICTURES, write_report
from patrickstar._report.run_file import Run, read_run
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.step_timeline import Channel
from patrickstar.testing import assert_same_bits

pytestmark = marks

STEPS = 8
RECORDED = [1, 2, 4, 8]
CHUNKS = PARAMETERS, GRADIENTS, STATES
COPIES = {Channel.TO_DEVICE: "h2d_bytes", Channel.TO_HOST: "d2h_bytes"}
PAGES = {Channel.DISK_READ: "disk_read_bytes", Channel.DISK_WRITE: "disk_write_bytes"}


@dataclass
class Recorded:
    """Training that was recorded, and the same one that was not."""

    run: Run
    stats: list[StepStats]
    results: list[torch.Tensor]
    plain_results: list[torch.Tensor]
    tier: str

    def moved(self, step: int) -> Counter[Channel]:
        """Return the recorded bytes of each channel in a step."""
        timeline = next(each for each in self.run.timelines if each.step == step)
        moved: Counter[Channel] = Counter()
        for work in timeline.work:
            moved[work.channel] += work.nbytes
        return moved


@pytest.fixture(scope="module", params=["host", "disk"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Train with and without a record. 1 MiB of 16-bit parameters, 6 MiB of states; activations of 16 KiB per layer."""
    folder = tmp_path_factory.mktemp(request.param)
    more = {"host_memory": "64MiB"}
    if request.param == "disk":
        more = {"host_memory": "6MiB", "disk": ps.Disk(folder)}
    log, results, stats = folder / "log.jsonl", [], []
    for records in (False, True):
        config = ps.Config(device=str(DEVICE), chunk_size="128KiB", device_memory=budget("1536KiB"), **more)
        engine = make_engine(layers, config)
        with engine.record(log) if records else nullcontext():
            found = []
            for batch in inputs(STEPS):
                found += train(engine, [batch], max_norm=1.0)
                stats.append(engine.stats.last)
        results.append(found + outcome(engine))
        engine.close()
    return Recorded(read_run(log), stats[STEPS:], results[1], results[0], request.param)


def test_a_record_changes_no_bit(recorded):
    assert_same_bits(recorded.plain_results, recorded.results, "results of training")
    assert [timeline.step for timeline in recorded.run.timelines] == RECORDED
    assert [step["h2d_bytes"] for step in recorded.run.steps] == [stats.h2d_bytes for stats in recorded.stats]


@pytest.mark.parametrize("step", RECORDED)
def test_bytes_are_those_of_the_statistics(recorded, step):
    """Updates on the host copy gradients and parameters without works of their own.

    On a CPU their kernel reads and writes both in place. Beside an accelerator a worker thread copies gradients to the
    host, and parameters back if they stay on the device; others are copied there when they are fetched. If all stay
    there, these are all copies of a step.

    With a disk, chunks are also read from it to the device, and written from there, which counts as a copy, too. Pages
    in flight at the end of the step belong to no record.
    """
    moved, stats = recorded.moved(step), recorded.stats[step - 1]
    rest = {channel: getattr(stats, name) - moved[channel] for channel, name in COPIES.items()}
    parameter_bytes = sum(nbytes for kind, _, nbytes in recorded.run.description["chunks"] if kind == "param16")
    if recorded.tier == "host":
        assert all(getattr(stats, name) > 0 for name in COPIES.values())
        assert HAS_ACCELERATOR or all(moved[channel] > 0 for channel in COPIES)
        assert 0 <= rest[Channel.TO_DEVICE] <= rest[Channel.TO_HOST] <= parameter_bytes, rest
        assert HAS_ACCELERATOR or rest[Channel.TO_DEVICE] == rest[Channel.TO_HOST]
    else:
        pages = {channel: getattr(stats, name) for channel, name in PAGES.items()}
        assert all(0 < moved[channel] <= nbytes for channel, nbytes in pages.items()), (moved, pages)
        most = parameter_bytes + pages[Channel.DISK_READ], parameter_bytes + pages[Channel.DISK_WRITE]
        assert all(0 <= nbytes <= limit for nbytes, limit in zip(rest.values(), most, strict=True)), (rest, most)


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_works_and_waits_are_in_order_and_waits_sum_to_the_statistics(recorded, number):
    """Waits of the host come first, whose sum the statistics have; those of the device's stream follow."""
    timeline = recorded.run.timelines[number]
    for work in timeline.work:
        assert work.asked_s <= work.start_s <= work.end_s <= timeline.end_s, work
    assert all(wait.start_s <= wait.end_s <= timeline.end_s for wait in timeline.stalls)
    if number == 0:
        return  # the first step's statistics contain the engine's construction
    stats = recorded.stats[timeline.step - 1]
    sums = [0.0, *accumulate(wait.end_s - wait.start_s for wait in timeline.stalls)]
    rounding_s = 1e-6 * len(sums)  # a log has microseconds
    if HAS_ACCELERATOR:
        assert any(math.isclose(total, stats.stall_s, abs_tol=rounding_s) for total in sums), (sums, stats.stall_s)
    else:
        assert math.isclose(sums[-1], stats.stall_s, abs_tol=rounding_s)


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_memory_is_within_the_budgets(recorded, number):
    """The host's budget holds chunks and buffers, the device's chunks and non-model data, at every time of a step."""
    run, timeline = recorded.run, recorded.run.timelines[number]
    stats = recorded.stats[timeline.step - 1]
    device, host = (memory_curves(timeline, tier) for tier in (Tier.DEVICE, Tier.HOST))
    chunks = [sum(values) for values in zip(*(device.values[name] for name in CHUNKS), strict=True)]
    assert max(chunks) <= run.description["device_budget_bytes"]
    assert device.peak <= run.description["device_budget_bytes"]
    assert host.peak <= run.description["host_budget_bytes"]
    if timeline.step > 1:  # the first one's statistics contain the engine's construction
        assert stats.device_peak_model_bytes <= device.peak and stats.host_peak_model_bytes <= host.peak
    assert all(min(values) >= 0 for curves in (device, host) for values in curves.values.values())


def test_the_page_has_all_pictures(recorded, tmp_path: Path):
    write_report([recorded.run], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    figures = json.loads(re.search(r'<script id="figures" type="application/json">(.*?)</script>', text, re.DOTALL)[1])
    for step in RECORDED:
        for name in PICTURES:
            assert any(trace.get("x") or trace.get("z") for trace in figures[f"run0-step{step}-{name}"]["data"]), name
    assert {"steps-seconds", "steps-bytes"} <= figures.keys()
