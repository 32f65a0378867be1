"""Time of the host between operators."""

from patrickstar._dry_run import host_time
from patrickstar._dry_run.host_time import HostClock, HostCosts


def test_the_way_to_the_tracer_does_not_count(monkeypatch):
    """The clock counts the code between operators: 5 s, 1 s and 4 s, of which 2 s each are the way to the tracer."""
    now_s = [0.0]
    monkeypatch.setattr(host_time.time, "thread_time", lambda: now_s[0])
    clock = HostClock(HostCosts(2.0, 0.0, 0.0))
    clock.start()
    seconds = []
    for between_s in (5.0, 1.0, 4.0):
        now_s[0] += between_s
        clock.enter()
        seconds.append(clock.take())
        now_s[0] += 100.0  # within the tracer
        clock.leave()
    now_s[0] += 0.5
    clock.end()
    assert [*seconds, clock.take()] == [3.0, 0.0, 1.0, 0.5]
    assert clock.operators == 3
