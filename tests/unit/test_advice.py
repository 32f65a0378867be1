"""Advice of a report: estimates of steps that are made by hand, whose right answers are known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patrickstar._report.advice import advice
from patrickstar._report.run_file import Run
from patrickstar._report.stalls import named_stalls
from patrickstar._schedule.step_timeline import Channel, ChunkAccess, Stall, StepTimeline, Work

GB = 10**9
CHUNKS = 10
# 10^9 parameters of 2 bytes, each with 12 bytes of masters and states.
DESCRIPTION = {
    "model": "M",
    "processes": 1,
    "precision": "bf16",
    "device": "cuda",
    "disk": None,
    "device_budget_bytes": 2 * GB,
    "host_budget_bytes": 64 * GB,
    "names": {},
    "chunks": [
        *(["param16", index, GB // 5] for index in range(CHUNKS)),
        *([kind, index, 4 * GB // 10] for kind in ("param32", "exp_avg", "exp_avg_sq") for index in range(CHUNKS)),
    ],
}


def run_with(**description: Any) -> Run:
    return Run(Path("log.jsonl"), {**DESCRIPTION, **description}, [{"step": 1}])


def works(channel: Channel, nbytes: int, seconds: float) -> list[Work]:
    """Return one work per chunk, one after the other from the begin of the step on."""
    each_s = seconds / CHUNKS
    return [
        Work(channel, f"param16[{index}]", nbytes // CHUNKS, 0.0, index * each_s, (index + 1) * each_s, False)
        for index in range(CHUNKS)
    ]


def step_of(
    seconds: float, computation_s: float, *, to_device_s: float = 4.0, non_model_bytes: int = 9 * GB // 5
) -> StepTimeline:
    """Return a step with links of 1 GB/s beside a GPU, whose updates have 14 bytes per parameter in a second.

    An operator needs one chunk at a time, 0.2 GB. Computation waits at the begin.
    """
    return StepTimeline(
        step=1,
        end_s=seconds,
        work=[
            *works(Channel.TO_DEVICE, round(to_device_s * GB), to_device_s),
            *works(Channel.TO_HOST, 2 * GB, 2.0),
            *works(Channel.UPDATE, 14 * GB, 1.0),
        ],
        stalls=[Stall(0.0, seconds - computation_s, "param16[3]")],
        moments=[ChunkAccess(0.0, index, (index,)) for index in range(CHUNKS)],
        phases=[(0.0, "forward"), (0.5, "backward"), (seconds, "step"), (seconds, "")],
        non_model=[(0.0, non_model_bytes)],
    )


def sentences_of(run: Run, timeline: StepTimeline) -> list[str]:
    return advice(run, timeline, named_stalls(timeline, {}))


def test_a_step_that_links_limit() -> None:
    """No parameter stays on the device: each is copied there for forward, and again for backward, at 1 GB/s.

    With 2 GB more, all stay from forward to backward; then computation limits the step. Other memory saves nothing.
    """
    sentences = sentences_of(run_with(), step_of(4.0, 2.0))
    links = "(estimate; measured: host to device 1.00 GB/s, device to host 1.00 GB/s)."
    assert sorted(sentences) == [
        f"1.86 GiB more device memory: 2.00 s per step instead of 4.00 s {links}",
        f"476.84 MiB more device memory: 3.50 s per step instead of 4.00 s {links}",
        f"Links between host and device twice as fast: 2.00 s per step instead of 4.00 s {links}",
    ]
    assert sentences[-1].startswith("476.84 MiB"), "the smallest gain is last"


def test_twice_the_batch() -> None:
    """Non-model data of 0.9 GB leaves place for 45% of the parameters; of 1.8 GB for none: 0.9 s more of copies."""
    timeline = step_of(3.1, 2.0, to_device_s=3.1, non_model_bytes=9 * GB // 10)
    (sentence,) = (text for text in sentences_of(run_with(), timeline) if text.startswith("Twice the batch"))
    assert sentence.startswith(
        "Twice the batch: 4.00 s per step instead of 3.10 s, so 55% more tokens per second (estim"
    )
    assert not any("batch" in text for text in sentences_of(run_with(), step_of(4.0, 2.0))), "twice 1.8 GB does not fit"


def test_a_step_that_the_disk_limits() -> None:
    """All states are on a disk of 4 GB/s that reads and writes 12 GB; the host has place for parameters alone."""
    timeline = step_of(4.0, 2.5)
    timeline.work += works(Channel.DISK_READ, 12 * GB, 3.0) + works(Channel.DISK_WRITE, 12 * GB, 3.5)
    timeline.work = [
        replace(work, end_s=work.start_s + 0.1) if work.channel is Channel.TO_DEVICE else work for work in timeline.work
    ]
    timeline.disk = [(0.0, 12 * GB)]
    timeline.end_s = 3.5
    sentences = sentences_of(run_with(disk="/disk", host_budget_bytes=2 * GB), timeline)
    disk = "(estimate; measured: disk read 4.00 GB/s, disk write 3.43 GB/s)."
    assert f"11.18 GiB more host memory: 2.00 s per step instead of 3.50 s {disk}" in sentences
    assert f"1.86 GiB more host memory: 2.92 s per step instead of 3.50 s {disk}" in sentences
    assert f"A disk twice as fast: 2.00 s per step instead of 3.50 s {disk}" in sentences
    assert not any(text.startswith("Links") for text in sentences), "they are not busy for long"


def test_what_nobody_waits_for_needs_no_advice() -> None:
    (sentence,) = sentences_of(run_with(), step_of(4.0, 3.95))
    assert "neither more memory nor faster transfers would make it faster" in sentence


STATES_OF_SGD = [each for each in DESCRIPTION["chunks"] if not each[0].startswith("exp_avg")]


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ({"processes": 2}, "the step of one of several processes waits for the others, too"),
        ({"precision": "fp32"}, "describes parameters of 16 bits, and these are fp32"),
        ({"chunks": STATES_OF_SGD}, "3.73 GiB for 1.86 GiB of parameters"),
        ({"device_budget_bytes": GB}, "finds no placement within the budgets"),
        ({"device_budget_bytes": 16 * GB}, "everything fits on the device, and nothing is transferred"),
    ],
)
def test_without_an_estimate_waits_are_described(description: dict[str, Any], reason: str) -> None:
    first, *others = sentences_of(run_with(**description), step_of(4.0, 2.0))
    assert first.startswith("There is no estimate: ") and reason in first
    assert any("Computation waits 2.000 s of 4.000 s (50%) for host to device" in text for text in others)
