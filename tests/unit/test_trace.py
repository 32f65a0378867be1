"""The trace: next use against a linear scan."""

from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._schedule.trace import NEVER, Moment, Trace

given = fixed_draws(300)

accesses = st.lists(st.sets(st.integers(0, 6), max_size=3).map(lambda drawn: tuple(sorted(drawn))), max_size=20)


def trace_of(moments: list[tuple[int, ...]]) -> Trace:
    return Trace([Moment(chunks) for chunks in moments])


def scan(moments: list[tuple[int, ...]], chunk: int, now: int) -> int:
    """The next use, looked for one moment after the other, this iteration's rest and then the next iteration."""
    for later in range(now + 1, now + 1 + len(moments)):
        if chunk in moments[later % len(moments)]:
            return later
    return NEVER


@given(accesses, st.data())
def test_next_use_is_what_a_scan_finds(moments, data):
    trace = trace_of(moments)
    for chunk in range(8):
        now = data.draw(st.integers(-1, max(0, len(moments) - 1)))
        assert trace.next_use(chunk, now) == scan(moments, chunk, now)


@given(accesses)
def test_uses_are_sorted_and_complete(moments):
    uses = trace_of(moments).uses
    assert {(chunk, now) for chunk, found in uses.items() for now in found} == {
        (chunk, now) for now, chunks in enumerate(moments) for chunk in chunks
    }
    assert all(found == sorted(found) for found in uses.values())


@given(st.lists(st.integers(0, 1 << 40), max_size=20))
def test_the_peak_is_the_largest_of_all_moments(non_model):
    trace = Trace([Moment((), nbytes) for nbytes in non_model])
    assert trace.peak_non_model_bytes == max([0, *non_model])
    Trace().moments.append(Moment((1,)))
    assert Trace().moments == [], "traces share nothing"
