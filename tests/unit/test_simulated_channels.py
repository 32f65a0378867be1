"""Simulated channels: one transfer at a time, none lost, and a monotonic clock."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar._dry_run.lanes import Interval, Wait
from patrickstar._dry_run.simulated_channels import HostMemory, SimulatedChannel, SimulatedClock

action = st.sampled_from(["begin", "urgent", "wait", "prioritize", "compute"])
actions = st.lists(st.tuples(action, st.integers(0, 1000)), max_size=40)


@given(actions)
def test_transfers_take_their_time_and_never_overlap(actions):
    clock = SimulatedClock()
    channel = SimulatedChannel("disk", 100.0, clock)
    made, before = [], 0.0
    for action, number in actions:
        if action in ("begin", "urgent"):
            made.append(channel.begin(number, "page", urgent=action == "urgent"))
        elif action == "compute":
            clock.now += number / 100
        elif made:
            transfer = made[number % len(made)]
            getattr(transfer, action)()
            assert action != "wait" or (transfer.done and transfer.ends_at <= clock.now)
        assert clock.now >= before
        before = clock.now
    for transfer in made:
        transfer.wait()
    assert channel.nbytes == sum(transfer.nbytes for transfer in made)
    assert abs(channel.busy_s - channel.nbytes / 100.0) < 1e-6
    # Sorted by end time: start times are rounded, and a transfer of 0 bytes could seem to start before its predecessor.
    made.sort(key=lambda transfer: (transfer.ends_at, transfer.nbytes == 0))
    spans = [(transfer.ends_at - transfer.nbytes / 100.0, transfer.ends_at) for transfer in made]
    assert all(start >= end - 1e-6 for (_, end), (start, _) in pairwise(spans))
    for transfer in made:
        assert transfer.ends_at - transfer.nbytes / 100 >= transfer.requested_at - 1e-6


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def channel(clock) -> SimulatedChannel:
    return SimulatedChannel("disk", 100.0, clock)


@pytest.mark.parametrize("urgent", [True, False], ids=["urgent from the start", "prioritized later"])
def test_urgent_transfers_run_before_queued_ones(channel, urgent):
    first, second, third = channel.begin(100, "a"), channel.begin(100, "b"), channel.begin(100, "c", urgent=urgent)
    if not urgent:
        third.prioritize()
    second.wait()
    assert (first.ends_at, third.ends_at, second.ends_at) == (1.0, 2.0, 3.0)


def test_a_cancelled_transfer_never_begins(channel):
    first, second = channel.begin(100, "a"), channel.begin(100, "b")
    second.cancel()
    first.wait()
    assert second.done and channel.nbytes == 100


def test_an_idle_channel_begins_at_the_request(channel, clock):
    channel.run(100, "a")
    clock.now = 10.0
    channel.run(100, "b")
    assert clock.now == 11.0 and channel.busy_s == 2.0


def test_a_lane_shows_the_part_of_each_transfer_within_the_step(channel, clock):
    for name in "abcd":
        channel.begin(100, name)
    clock.now = 1.5
    assert channel.lane(0.0).intervals == (Interval(0.0, 1.0, "a"), Interval(1.0, 1.5, "b"))
    channel.start_step()
    clock.now = 3.5
    before = len(channel.waiting)
    expected = Interval(0.0, 0.5, "b"), Interval(0.5, 1.5, "c"), Interval(1.5, 2.0, "d")
    assert channel.lane(1.5).intervals == expected
    assert len(channel.waiting) == before, "looking must not begin a transfer"
    channel.catch_up()
    assert channel.lane(1.5).intervals == expected


def test_transfers_of_earlier_steps_are_forgotten(channel):
    for step in range(5):
        channel.start_step()
        channel.run(100, f"{step}")
        channel.begin(0, "nothing")
        assert len(channel.begun) == 2
        assert channel.lane(float(step)).intervals == (Interval(0.0, 1.0, f"{step}"),)


def test_waits_are_recorded_with_the_name_of_what_is_waited_for(channel, clock):
    clock.phase = lambda: "forward"
    first, second = channel.begin(100, "a"), channel.begin(100, "b")
    clock.now = 0.5
    second.wait()
    first.wait()  # it has ended: no wait
    channel.run(0, "nothing")
    assert clock.waits == [Wait(0.5, 1.5, "disk", "b", "forward")]


def test_channels_that_share_a_memory_are_slower_together_and_as_fast_as_they_can_alone(clock):
    update, copies, disk = (SimulatedChannel(name, rate, clock) for name, rate in (("u", 100), ("c", 60), ("d", 40)))
    HostMemory(120.0, shared_by=(update, copies), drives=(disk,))
    assert update.begin(100, "alone").ends_at == 1.0
    clock.now = 0.5
    assert disk.begin(40, "beside an update").ends_at == 1.5, "a drive is served first"
    assert copies.begin(60, "beside both").ends_at == 0.5 + 200 / 120
    clock.now = 10.0
    assert [copies.begin(60, "alone").ends_at, disk.begin(40, "both fit").ends_at] == [11.0, 11.0]


def test_channels_that_are_always_busy_share_a_memory_in_proportion_to_their_rates(clock):
    update, copies = SimulatedChannel("update", 133.0, clock), SimulatedChannel("copies", 100.0, clock)
    HostMemory(170.0, shared_by=(update, copies), drives=())
    for _ in range(300):
        update.begin(1, "piece")
        copies.begin(1, "chunk")
    while clock.now < 1.0:
        clock.now += 0.0001
        update.catch_up()
        copies.catch_up()
    assert update.nbytes == pytest.approx(170 * 133 / 233, abs=3)
    assert copies.nbytes == pytest.approx(170 * 100 / 233, abs=3)
