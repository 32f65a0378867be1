"""Rounds: whatever processes do, in whatever order, each gets what it wants, and none waits forever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar._schedule.coordination import Message, Request, derive_agreement
from patrickstar.errors import PeerError

CHUNKS = 4
acts = st.one_of(
    st.tuples(st.just(Request.GATHER), st.integers(0, CHUNKS - 1)),
    st.tuples(st.just(Request.NOTHING), st.integers(0, CHUNKS - 1)),  # gradients of a chunk are ready
    st.tuples(st.just(Request.MEMORY), st.integers(0, CHUNKS - 1)),  # and their memory is needed
)
programs = st.lists(st.lists(acts, max_size=12), min_size=2, max_size=5)


class Process:
    """What one process does until its step."""

    def __init__(self, program):
        self.program = [*program, (Request.STEP, -1)]
        self.at = 0
        self.ready = set()
        self.reduced = []
        self.gathered = []
        self._begin()

    @property
    def over(self):
        return self.at == len(self.program)

    def _begin(self):
        """Gradients become ready; what has nothing to wait for is passed over."""
        while not self.over:
            want, chunk = self.program[self.at]
            if want is Request.NOTHING and chunk not in self.ready:
                self.ready.add(chunk)
                return
            if want in (Request.GATHER, Request.STEP) or (want is Request.MEMORY and chunk in self.ready):
                return
            self.at += 1

    def word(self):
        want, chunk = self.program[self.at]
        return Message(want, chunk if want is Request.GATHER else -1, frozenset(self.ready))

    def hear(self, rank, found):
        want, chunk = self.program[self.at]
        for reduced, ranks in found.reductions:
            assert (rank in ranks) == (reduced in self.ready)
            if rank in ranks:
                self.ready.discard(reduced)
                self.reduced.append(reduced)
        if want is Request.GATHER and any(chunk == c and rank in ranks for c, ranks in found.gathers):
            self.gathered.append(chunk)
        elif (
            want is Request.GATHER
            or (want is Request.MEMORY and chunk in self.ready)
            or (want is Request.STEP and not found.synchronized)
        ):
            return
        self.at += 1
        self._begin()


@settings(max_examples=300, deadline=None)
@given(programs)
def test_everybody_comes_to_the_step(program):
    processes = [Process(one) for one in program]
    for _ in range(sum(map(len, program)) * CHUNKS + CHUNKS + 2):
        if all(process.over for process in processes):
            break
        assert not any(process.over for process in processes), "one has left the step before the others came"
        found = derive_agreement([process.word() for process in processes])
        assert len({chunk for chunk, _ in found.reductions}) == len(found.reductions)
        for rank, process in enumerate(processes):
            process.hear(rank, found)
    assert all(process.over for process in processes), "somebody waits forever"
    for process, acted in zip(processes, program, strict=True):
        assert process.gathered == [chunk for want, chunk in acted if want is Request.GATHER]
        assert not process.ready, "gradients were left behind"


def test_all_that_want_the_same_get_it_at_once():
    found = derive_agreement([Message(Request.GATHER, 3, frozenset({5}))] * 4)
    assert found.gathers == ((3, (0, 1, 2, 3)),)
    assert found.reductions == ((5, (0, 1, 2, 3)),)


def test_gradients_wait_for_those_that_may_still_have_some():
    computing, done = Message(Request.GATHER, 1), Message(Request.STEP)
    ready = Message(Request.MEMORY, ready=frozenset({2}))
    assert derive_agreement([ready, computing]).reductions == ()
    assert derive_agreement([ready, done]).reductions == ((2, (0,)),)


def test_those_who_wait_for_each_other_go_on():
    messages = [Message(Request.MEMORY, ready=frozenset({chunk})) for chunk in (1, 2)]
    found = derive_agreement(messages)
    assert found.reductions == ((1, (0,)), (2, (1,)))


def test_different_meetings_are_refused():
    with pytest.raises(PeerError, match="rank 0: a step; rank 1: clipping"):
        derive_agreement([Message(Request.STEP), Message(Request.NORM)])
