"""Prefetch policies compared with brute force and with on-demand fetching, with instantaneous transfers."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import draws

from patrickstar._schedule.eviction_prefetch import AggressivePrefetch, DemandFetch, PrefetchMove, PrefetchPolicy
from patrickstar._schedule.trace import NEVER, Moment, Trace

quick = settings(deadline=None, max_examples=draws(200), print_blob=True)
POLICIES = (DemandFetch, AggressivePrefetch)

ONE, SEVERAL = st.just(1), st.integers(1, 4)


@st.composite
def cases(draw, sizes=SEVERAL, most_non_model=4, most_moments=9):
    """Draw a trace, the sizes of its chunks, and a budget that every moment fits."""
    nbytes = dict(enumerate(draw(st.lists(sizes, min_size=2, max_size=5))))
    budget_bytes = draw(st.integers(max(nbytes.values()), sum(nbytes.values())))
    moments = []
    for _ in range(draw(st.integers(1, most_moments))):
        left, chunks = budget_bytes, []
        for chunk in draw(st.lists(st.sampled_from(sorted(nbytes)), max_size=3, unique=True)):
            if nbytes[chunk] <= left:
                chunks.append(chunk)
                left -= nbytes[chunk]
        moments.append(Moment(tuple(chunks), draw(st.integers(0, min(left, most_non_model)))))
    return Trace(moments), nbytes, budget_bytes


limits = st.integers(0, 12)


class Play:
    """Device with instantaneous transfers, which checks every decision and counts the fetched bytes."""

    def __init__(self, policy: PrefetchPolicy, nbytes: dict, budget_bytes: int, limit_bytes: int = 99) -> None:
        self.policy, self.trace, self.nbytes = policy, policy.trace, nbytes
        self.budget_bytes, self.limit_bytes = budget_bytes, limit_bytes
        self.present: set[int] = set()
        self.unused: set[int] = set()
        self.log: list[tuple[int, PrefetchMove]] = []
        self.fetched_bytes = 0

    def bytes_of(self, chunks) -> int:
        return sum(self.nbytes[chunk] for chunk in chunks)

    def run(self, iterations: int) -> int:
        """Run some iterations and return the bytes fetched, without chunks fetched for uses after the end."""
        for _ in range(iterations):
            for now in range(len(self.trace.moments)):
                self.step(now)
        return self.fetched_bytes - self.bytes_of(self.unused)

    def step(self, now: int) -> None:
        moment = self.trace.moments[now]
        used = set(moment.chunks)
        room = self.budget_bytes - moment.non_model_bytes
        missing = used - self.present
        for chunk in self.policy.eviction_order(self.present - used, now):
            if self.bytes_of(self.present | missing) <= room:
                break
            self.drop(chunk)
        self.present |= used
        self.unused -= used
        self.fetched_bytes += self.bytes_of(missing)
        decisions = self.policy.prefetches(now, frozenset(self.present), used, self.limit_bytes)
        assert self.bytes_of(move.fetch for move in decisions) <= self.limit_bytes
        for move in decisions:
            self.check(move, now, used)
            self.log.append((now, move))

    def drop(self, chunk: int) -> None:
        self.present.remove(chunk)
        self.unused.discard(chunk)

    def check(self, move: PrefetchMove, now: int, used: set[int]) -> None:
        use = self.policy.trace.next_use(move.fetch, now)
        assert use < NEVER
        for chunk in move.evict:
            assert chunk not in used, "a held chunk was evicted"
            assert self.policy.trace.next_use(chunk, now) > use, "a chunk with an earlier next use was evicted"
            self.drop(chunk)
        assert move.fetch not in self.present
        self.present.add(move.fetch)
        self.unused.add(move.fetch)
        self.fetched_bytes += self.nbytes[move.fetch]
        present_bytes = self.bytes_of(self.present)
        moments = self.trace.moments
        for moment in range(now, use + 1):
            assert present_bytes <= self.budget_bytes - moments[moment % len(moments)].non_model_bytes


def play(policy: type[PrefetchPolicy], case, limit_bytes: int = 99) -> Play:
    trace, nbytes, budget_bytes = case
    return Play(policy(trace, nbytes, budget_bytes), nbytes, budget_bytes, limit_bytes)


def optimum(case, iterations: int) -> int:
    """Return the fewest bytes that any policy can fetch, by exhaustive search; the device is empty at first."""
    trace, nbytes, budget_bytes = case
    moments = trace.moments * iterations

    @cache
    def best(now: int, present: frozenset[int]) -> int:
        if now == len(moments):
            return 0
        needed = frozenset(moments[now].chunks)
        room = budget_bytes - moments[now].non_model_bytes - sum(nbytes[chunk] for chunk in needed)
        others = sorted(present - needed)
        caching = [{chunk for i, chunk in enumerate(others) if mask >> i & 1} for mask in range(1 << len(others))]
        rest = min(best(now + 1, needed | keep) for keep in caching if sum(nbytes[chunk] for chunk in keep) <= room)
        return sum(nbytes[chunk] for chunk in needed - present) + rest

    return best(0, frozenset())


@quick
@given(cases(ONE, most_non_model=0) | cases(ONE))
def test_on_demand_the_optimum_is_fetched(case):
    """Also if non-model data comes and goes."""
    played = play(DemandFetch, case)
    assert played.run(3) == optimum(case, 3) and not played.log


@quick
@given(st.sampled_from(POLICIES), cases(), limits)
def test_every_decision_is_within_the_rules(policy, case, limit_bytes):
    play(policy, case, limit_bytes).run(3)


@quick
@given(st.sampled_from(POLICIES), cases(), st.data())
def test_answers_depend_on_the_arguments_alone(policy, case, data):
    """Earlier calls in any order, executed or not, do not change the result."""
    trace, nbytes, budget_bytes = case
    asked = policy(trace, nbytes, budget_bytes)
    for _ in range(6):
        now = data.draw(st.integers(0, len(trace.moments) - 1))
        present = data.draw(st.sets(st.sampled_from(sorted(nbytes))))
        held = set(trace.moments[now].chunks)
        limit_bytes = data.draw(limits)
        fresh = policy(trace, nbytes, budget_bytes)
        decisions = fresh.prefetches(now, sorted(present), sorted(held), limit_bytes)
        assert asked.prefetches(now, present, held, limit_bytes) == decisions
        assert asked.eviction_order(present, now) == fresh.eviction_order(present, now)


def chain(layers: int, chunks_that_fit: int):
    """Return a case with one chunk per layer, for forward and backward."""
    moments = [Moment((chunk,)) for chunk in [*range(layers), *reversed(range(layers))]]
    return Trace(moments), dict.fromkeys(range(layers), 1), chunks_that_fit


@quick
@given(st.integers(2, 9).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers))))
def test_over_a_chain_the_same_bytes_come_and_the_next_layer_is_there(drawn):
    layers, fit = drawn
    for policy in POLICIES:
        played = play(policy, chain(layers, fit))
        assert played.run(3) - play(policy, chain(layers, fit)).run(2) == 2 * (layers - fit)
    for now in range(2 * layers if fit > 1 else 0):
        played.step(now)
        assert played.trace.moments[(now + 1) % (2 * layers)].chunks[0] in played.present


def test_chunks_that_are_never_used_are_evicted_first_and_those_in_use_are_waited_for():
    policy = AggressivePrefetch(Trace([Moment((0,)), Moment((1,)), Moment((2,))]), {0: 1, 1: 1, 2: 1, 7: 1}, 3)
    assert policy.prefetches(0, {0, 1, 7}, {0}, 9) == [PrefetchMove(2, (7,))]
    trace = Trace([Moment((0,)), Moment((1,)), Moment((2,)), Moment((1,))])
    policy = AggressivePrefetch(trace, {0: 1, 1: 1, 2: 1}, 2)
    assert policy.prefetches(0, {0, 1}, {0}, 9) == []
    assert policy.prefetches(0, {0, 1}, set(), 9) == [PrefetchMove(2, (0,))]
    assert policy.prefetches(1, {0, 1}, {1}, 9) == [PrefetchMove(2, (0,))]
    roomy = AggressivePrefetch(trace, {0: 1, 1: 1, 2: 1, 7: 1, 8: 1}, 3)
    assert roomy.prefetches(0, {0, 7, 8}, {0, 7}, 1) == [PrefetchMove(1, (8,))]


class Counting(Trace):
    """Trace that counts the chunks whose next use it computes."""

    asked = 0

    def next_use(self, chunk: int, now: int) -> int:
        self.asked += 1
        return super().next_use(chunk, now)

    def furthest_first(self, chunks, now) -> list[int]:
        chunks = list(chunks)
        self.asked += len(chunks)
        return super().furthest_first(chunks, now)


class Visits(list):
    """List of moments that counts accesses."""

    visits = 0

    def __getitem__(self, at):
        self.visits += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("layers", [20, 80, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fit", [2, 10, 20, 200])
def test_asking_again_costs_the_same_for_any_length(layers, fit):
    """Use one operator per layer and many moments without accesses."""
    layers_trace, nbytes, budget_bytes = chain(layers, fit)
    moments = Visits(quiet for moment in layers_trace.moments for quiet in (moment, *[Moment(())] * 10))
    trace = Counting(moments)
    played = Play(AggressivePrefetch(trace, nbytes, budget_bytes), nbytes, budget_bytes)
    played.run(1)
    for now in range(len(moments)):
        played.step(now)
        before = trace.asked, moments.visits
        assert played.policy.prefetches(now, played.present, set(moments[now].chunks), 99) == []
        # The cost may depend on the number of present chunks, but not on the length of the trace.
        assert trace.asked - before[0] <= (2 * fit + 4 if moments[now].chunks else 4)
        assert moments.visits - before[1] <= 6
