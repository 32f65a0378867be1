"""Lanes: one transfer at a time, none lost, and a clock that only goes on."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from patrickstar._dry_run.simulated_channels import SimulatedChannel, SimulatedClock

actions = st.lists(
    st.tuples(st.sampled_from(["begin", "urgent", "wait", "prioritize", "compute"]), st.integers(0, 1000)), max_size=40
)


@given(actions)
def test_bytes_take_their_time_and_no_lane_is_busy_twice(actions):
    clock = SimulatedClock()
    lane = SimulatedChannel("disk", 100.0, clock)
    made, before = [], 0.0
    for what, number in actions:
        if what in ("begin", "urgent"):
            made.append(lane.begin(number, "page", urgent=what == "urgent"))
        elif what == "compute":
            clock.now += number / 100
        elif made:
            transfer = made[number % len(made)]
            getattr(transfer, what)()
            assert what != "wait" or (transfer.done and transfer.ends_at <= clock.now)
        assert clock.now >= before
        before = clock.now
    for transfer in made:
        transfer.wait()
    assert lane.nbytes == sum(transfer.nbytes for transfer in made)
    assert abs(lane.busy_s - lane.nbytes / 100.0) < 1e-6
    # By their ends: a beginning is rounded, and one of no bytes could seem to come after it.
    made.sort(key=lambda transfer: (transfer.ends_at, transfer.nbytes == 0))
    spans = [(transfer.ends_at - transfer.nbytes / 100.0, transfer.ends_at) for transfer in made]
    assert all(start >= end - 1e-6 for (_, end), (start, _) in pairwise(spans))
    for transfer in made:
        assert transfer.ends_at - transfer.nbytes / 100 >= transfer.requested_at - 1e-6


def test_what_is_urgent_goes_before_what_waits():
    clock = SimulatedClock()
    lane = SimulatedChannel("disk", 100.0, clock)
    first, second, urgent = lane.begin(100, "a"), lane.begin(100, "b"), lane.begin(100, "c", urgent=True)
    second.wait()
    assert (first.ends_at, urgent.ends_at, second.ends_at) == (1.0, 2.0, 3.0)


def test_whoever_is_waited_for_can_be_prioritizeed():
    clock = SimulatedClock()
    lane = SimulatedChannel("disk", 100.0, clock)
    first, second, third = (lane.begin(100, name) for name in "abc")
    third.prioritize()
    second.wait()
    assert (first.ends_at, third.ends_at, second.ends_at) == (1.0, 2.0, 3.0)


def test_what_is_cancelled_never_begins():
    lane = SimulatedChannel("disk", 100.0, SimulatedClock())
    first, second = lane.begin(100, "a"), lane.begin(100, "b")
    second.cancel()
    first.wait()
    assert second.done and lane.nbytes == 100


def test_an_idle_lane_begins_when_it_is_asked():
    clock = SimulatedClock()
    lane = SimulatedChannel("disk", 100.0, clock)
    lane.run(100, "a")
    clock.now = 10.0
    lane.run(100, "b")
    assert clock.now == 11.0 and lane.busy_s == 2.0
