"""Test coordination: each process is granted its requests in any order, and none waits forever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import draws

from patrickstar._schedule.coordination import Agreement, Message, Request, derive_agreement
from patrickstar.errors import PeerError

CHUNKS = 4
requests = st.one_of(
    st.tuples(st.sampled_from([Request.GATHER, Request.REFRESH]), st.integers(0, CHUNKS - 1)),
    st.tuples(st.just(Request.NOTHING), st.integers(0, CHUNKS - 1)),  # gradients of a chunk are ready
    # Their memory is needed, and the host has or lacks room for them.
    st.tuples(st.sampled_from([Request.MEMORY, Request.MEMORY_ALONE]), st.integers(0, CHUNKS - 1)),
)
programs = st.lists(st.lists(requests, max_size=12), min_size=2, max_size=5)


class Process:
    """Simulated process with its requests until the optimizer step."""

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
        """Mark gradients as ready, and skip requests that need not wait."""
        while not self.over:
            request, chunk = self.program[self.at]
            if request is Request.NOTHING and chunk not in self.ready:
                self.ready.add(chunk)
                return
            if request.is_gather or request is Request.STEP or (request.waits_for_memory and chunk in self.ready):
                return
            self.at += 1

    def message(self):
        request, chunk = self.program[self.at]
        return Message(request, chunk if request.is_gather else -1, frozenset(self.ready))

    def apply(self, rank, agreement):
        request, chunk = self.program[self.at]
        for reduced, ranks in agreement.reductions:
            assert (rank in ranks) == (reduced in self.ready)
            if rank in ranks:
                self.ready.discard(reduced)
                self.reduced.append(reduced)
        if request.is_gather and any(chunk == c and rank in ranks for c, ranks in agreement.gathers):
            self.gathered.append(chunk)
        elif (
            request is Request.GATHER
            or (request is Request.MEMORY and chunk in self.ready and not agreement.blocked)
            or (request is Request.MEMORY_ALONE and chunk in self.ready)
            or (request is Request.STEP and not agreement.synchronized)
        ):
            return
        self.at += 1
        self._begin()


@settings(max_examples=draws(300), deadline=None)
@given(programs)
def test_all_processes_reach_the_step(program):
    processes = [Process(one) for one in program]
    for _ in range(sum(map(len, program)) * CHUNKS + CHUNKS + 2):
        if all(process.over for process in processes):
            break
        assert not any(process.over for process in processes), "a process left the step before all reached it"
        agreement = derive_agreement([process.message() for process in processes])
        assert len({chunk for chunk, _ in agreement.reductions}) == len(agreement.reductions)
        for rank, process in enumerate(processes):
            process.apply(rank, agreement)
    assert all(process.over for process in processes), "a process waits forever"
    for process, granted in zip(processes, program, strict=True):
        assert process.gathered == [chunk for request, chunk in granted if request.is_gather]
        assert not process.ready, "gradients were left behind"


def waits(request: Request, *ready: int) -> Message:
    """Return the message of a process that has gradients of these chunks."""
    return Message(request, ready=frozenset(ready))


GATHER, STEP = Message(Request.GATHER, 3), waits(Request.STEP)
ONE, TWO = waits(Request.MEMORY, 1), waits(Request.MEMORY_ALONE, 2)
AGREEMENTS = {
    # Reductions, gathers, whether all are done, refreshes, and whether all wait for memory.
    "equal requests are granted at once": (
        [Message(Request.GATHER, 3, frozenset({5}))] * 2,
        Agreement(((5, (0, 1)),), ((3, (0, 1)),), False),
    ),
    "one stale copy lets all replicas exchange shards": (
        [GATHER, Message(Request.REFRESH, 3), Message(Request.GATHER, 1), STEP],
        Agreement((), ((1, (2,)), (3, (0, 1))), False, frozenset({3})),
    ),
    "gradients wait for processes without them": ([ONE, GATHER], Agreement((), ((3, (1,)),), False)),
    "but not for those that are done": ([ONE, STEP], Agreement(((1, (0,)),), (), False)),
    "where all wait for memory gradients are moved to the host": ([ONE, TWO], Agreement((), (), False, blocked=True)),
    "or reduced as they are if no host has room": (
        [waits(Request.MEMORY_ALONE, 1), TWO],
        Agreement(((1, (0,)), (2, (1,))), (), False, blocked=True),
    ),
    "not while one computes": ([ONE, waits(Request.NOTHING)], Agreement((), (), False)),
    "nobody waits who is done": ([STEP, STEP], Agreement((), (), True)),
}


@pytest.mark.parametrize(("messages", "agreement"), AGREEMENTS.values(), ids=AGREEMENTS)
def test_agreements(messages, agreement):
    assert derive_agreement(messages) == agreement


def test_different_barriers_are_refused():
    with pytest.raises(PeerError, match="rank 0: a step; rank 1: clipping"):
        derive_agreement([Message(Request.STEP), Message(Request.NORM)])
