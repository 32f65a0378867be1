"""The model of a recorded step, and the steps that it does not describe."""

import pytest
from test_advice import GB, run_with, step_of, works

from patrickstar._report.run_file import Run
from patrickstar._report.stalls import named_stalls
from patrickstar._report.step_model import NoEstimateError, StepModel, channel_rate
from patrickstar._schedule.step_timeline import Channel, StepTimeline, Work


def model_of(run: Run, timeline: StepTimeline) -> StepModel:
    return StepModel.of(run, timeline, named_stalls(timeline, {}))


def test_waits_that_transfers_do_not_explain_are_assumed_to_remain() -> None:
    """The step took a second longer than its slowest channel, which is a quarter of the 4 s of transfers."""
    model = model_of(run_with(), step_of(5.0, 2.0))
    assert model.exposed == pytest.approx(0.25)
    assert model.seconds() == pytest.approx(5.0)
    assert model.with_memory(device_bytes=2 * GB).seconds() == pytest.approx(2.0 + 0.25 * 2.0)


def test_steps_that_the_model_does_not_describe() -> None:
    twice = step_of(4.0, 2.0)
    twice.phases = [(0.0, "forward"), (0.5, "backward"), (1.0, "forward"), (2.0, "backward"), (3.0, "step"), (4.0, "")]
    with pytest.raises(NoEstimateError, match="a step of one backward, and this one has 2"):
        model_of(run_with(), twice)
    with pytest.raises(NoEstimateError, match=r"takes 4\.000 s at the measured rates, longer than it took"):
        model_of(run_with(), step_of(3.0, 2.0))
    no_copies = step_of(4.0, 2.0)
    no_copies.work = works(Channel.UPDATE, 14 * GB, 1.0)
    with pytest.raises(NoEstimateError, match="no copy between host and device was recorded"):
        model_of(run_with(), no_copies)


def test_works_at_the_same_time_count_once() -> None:
    works_of_two = [
        Work(Channel.DISK_READ, "a", GB, 0.0, 0.0, 2.0, False),
        Work(Channel.DISK_READ, "b", GB, 0.0, 1.0, 2.0, False),
        Work(Channel.DISK_READ, "c", 2 * GB, 0.0, 3.0, 5.0, False),
    ]
    assert channel_rate(StepTimeline(end_s=5.0, work=works_of_two), Channel.DISK_READ) == pytest.approx(GB)
    assert channel_rate(StepTimeline(end_s=5.0), Channel.DISK_READ) is None
