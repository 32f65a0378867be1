"""Advice of a report on steps that are made by hand, whose right answers are known."""

from pathlib import Path

import pytest

from patrickstar._report.advice import advice, channel_rate
from patrickstar._report.run_file import Run
from patrickstar._report.stalls import named_stalls
from patrickstar._schedule.step_timeline import Channel, Stall, StepTimeline, Work

GB = 10**9
CHUNKS = 10


def works(channel: Channel, nbytes: int, seconds: float) -> list[Work]:
    """Return one work per chunk, one after the other from the begin of the step on."""
    each_s = seconds / CHUNKS
    return [
        Work(channel, f"param16[{index}]", nbytes // CHUNKS, 0.0, index * each_s, (index + 1) * each_s, False)
        for index in range(CHUNKS)
    ]


def sentences(*works_of_channels: list[Work], waited_s: float = 2.0) -> list[str]:
    """Return the advice on a step of 4 s with these works, which waits for the third one at its begin."""
    timeline = StepTimeline(
        step=1,
        end_s=4.0,
        work=[work for works in works_of_channels for work in works],
        stalls=[Stall(0.0, waited_s, "param16[3]")],
        phases=[(0.0, "forward"), (0.5, "backward"), (4.0, "step"), (4.0, "")],
    )
    return advice(Run(Path("log.jsonl"), {"device": "cuda", "names": {}}), timeline, named_stalls(timeline, {}))


@pytest.mark.parametrize(
    ("channel", "memory", "what"),
    [
        (Channel.TO_DEVICE, "device", "is copied to the device in a step"),
        (Channel.DISK_READ, "host", "is read from the disk in a step"),
    ],
)
def test_a_wait_names_its_rate_and_the_memory_that_would_save_it(channel, memory, what) -> None:
    wait, batch, dry_run = sentences(works(channel, 4 * GB, 4.0))
    assert wait == (
        f"Computation waits 2.000 s of 4.000 s (50%) for {channel.value}, which moves 3.73 GiB at 1.00 GB/s. 3.73 GiB "
        f"more {memory} memory would hold all that {what}, and save this wait."
    )
    assert "twice the batch gives up to 33% more tokens per second" in batch
    assert "patrickstar train --dry-run" in dry_run


def test_a_wait_that_no_memory_saves() -> None:
    wait, *_ = sentences(works(Channel.UPDATE, 14 * GB, 1.0))
    assert "14.00 GB/s" in wait and wait.endswith("Twice its rate would save up to half of this wait.")


def test_what_nobody_waits_for_needs_no_advice() -> None:
    (sentence,) = sentences(works(Channel.TO_DEVICE, 4 * GB, 4.0), waited_s=0.05)
    assert "neither more memory nor faster transfers would make it faster" in sentence


def test_works_at_the_same_time_count_once() -> None:
    works_of_two = [
        Work(Channel.DISK_READ, "a", GB, 0.0, 0.0, 2.0, False),
        Work(Channel.DISK_READ, "b", GB, 0.0, 1.0, 2.0, False),
        Work(Channel.DISK_READ, "c", 2 * GB, 0.0, 3.0, 5.0, False),
    ]
    assert channel_rate(StepTimeline(end_s=5.0, work=works_of_two), Channel.DISK_READ) == pytest.approx(GB)
    assert channel_rate(StepTimeline(end_s=5.0), Channel.DISK_READ) is None
