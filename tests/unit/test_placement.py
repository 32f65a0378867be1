"""Where chunks begin, which optimizer chunks live in the margin space, where an embedding runs: all from bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.layout.lists import scheme_for
from patrickstar.layout.mapping import ChunkSpec
from patrickstar.schedule.placement import (
    HOST,
    WARM_UP_PERCENT,
    Tiers,
    embedding_runs_on_host,
    initial_placement,
    margin_chunks,
)

quick = settings(derandomize=True, deadline=None, max_examples=300)

TRAINED, FROZEN = scheme_for("bfloat16", trained=True), scheme_for("bfloat16", trained=False)


def chunk(index, numel, scheme=TRAINED):
    return ChunkSpec(index, scheme, numel, numel, (f"p{index}",), private=False)


chunk_lists = st.lists(
    st.tuples(st.integers(1, 200).map(lambda n: 32 * n), st.sampled_from([TRAINED, FROZEN])), min_size=1, max_size=12
).map(lambda drawn: [chunk(index, numel, scheme) for index, (numel, scheme) in enumerate(drawn)])

nbytes = st.integers(0, 200_000)
shares = st.floats(0, 1.5)


# Where chunks begin


@quick
@given(chunk_lists, shares, shares)
def test_what_begins_on_a_tier_fits_it(chunks, device_share, host_share):
    total = sum(c.total_bytes for c in chunks)
    device, host = int(device_share * total), int(host_share * total)
    placement = initial_placement(chunks, device, host)
    if placement is None:
        return
    assert list(placement) == [c.index for c in chunks]
    on_device = sum(c.compute_bytes for c in chunks if placement[c.index].compute_on_device)
    on_device += sum(c.optimizer_bytes for c in chunks if placement[c.index].optimizer_on_device)
    assert on_device <= device
    assert total - on_device <= host


@quick
@given(chunk_lists, shares)
def test_with_a_host_for_everything_no_optimizer_chunk_begins_on_the_device(chunks, device_share):
    total, largest = sum(c.total_bytes for c in chunks), max(c.compute_bytes for c in chunks)
    device = largest + int(device_share * total)
    placement = initial_placement(chunks, device, total + largest)
    assert placement is not None
    assert not any(tiers.optimizer_on_device for tiers in placement.values())
    warm = sum(c.compute_bytes for c in chunks if placement[c.index].compute_on_device)
    assert warm <= device * WARM_UP_PERCENT // 100
    left_over = [c.compute_bytes for c in chunks if not placement[c.index].compute_on_device]
    assert all(warm + nbytes > device * WARM_UP_PERCENT // 100 for nbytes in left_over)


def test_no_place_to_begin_in():
    chunks = [chunk(0, 64), chunk(1, 64)]
    assert initial_placement(chunks, 10_000, 0) is not None
    assert initial_placement(chunks, 0, 10_000) is None, "nothing could be computed"
    assert initial_placement(chunks, 128, 1536) is None, "no room to exchange two chunks"


def test_where_chunks_begin_by_hand():
    chunks = [chunk(0, 64), chunk(1, 64), chunk(2, 64)]
    below = Tiers(compute_on_device=True, optimizer_on_device=False)
    assert initial_placement(chunks, 480, 10_000) == {0: below, 1: below, 2: below}
    assert initial_placement(chunks, 479, 10_000) == {0: below, 1: below, 2: HOST}, "80 % of 479 is less than three"
    everything = Tiers(compute_on_device=True, optimizer_on_device=True)
    assert initial_placement(chunks, 3 * 896, 0) == {0: everything, 1: everything, 2: everything}


# The margin space


@quick
@given(chunk_lists, nbytes, st.booleans())
def test_placed_chunks_fit_into_the_margin_and_no_other_would_have(chunks, chunkable, accumulates):
    placed = margin_chunks(chunks, chunkable, accumulates=accumulates)
    margin = chunkable - sum(c.compute_bytes for c in chunks)
    assert placed == sorted(set(placed))
    for c in chunks:
        needed = c.optimizer_bytes + (4 * c.numel if accumulates else 0)
        if c.index in placed:
            assert c.scheme.trained
            margin -= needed
            assert margin >= 0
        elif c.scheme.trained:
            assert needed > margin, f"{c} would have fitted"


@quick
@given(chunk_lists, nbytes)
def test_parameters_come_first(chunks, chunkable):
    if sum(c.compute_bytes for c in chunks) >= chunkable:
        assert margin_chunks(chunks, chunkable) == []


@quick
@given(chunk_lists)
def test_with_room_for_everything_all_trained_chunks_are_placed(chunks):
    everything = sum(c.total_bytes for c in chunks)
    trained = [c.index for c in chunks if c.scheme.trained]
    assert margin_chunks(chunks, everything) == trained
    if trained:
        assert len(margin_chunks(chunks, everything - 1)) == len(trained) - 1


def test_the_margin_by_hand():
    chunks = [chunk(0, 64), chunk(1, 320), chunk(2, 64, FROZEN), chunk(3, 64)]
    param16 = 2 * (64 + 320 + 64 + 64)
    assert margin_chunks(chunks, param16 + 12 * 64) == [0]
    assert margin_chunks(chunks, param16 + 12 * 64 - 1) == []
    assert margin_chunks(chunks, param16 + 12 * 128) == [0, 3], "the large one in between is passed over"
    assert margin_chunks(chunks, param16 + 12 * 384) == [0, 1]
    assert margin_chunks(chunks, param16 + 16 * 64 - 1, accumulates=True) == []
    assert margin_chunks(chunks, param16 + 16 * 64, accumulates=True) == [0]


# Embeddings


@pytest.mark.parametrize(
    ("moved", "output", "on_host"),
    [(0, 0, False), (201, 100, True), (200, 100, False), (199, 100, False), (1, 0, True)],
)
def test_an_embedding_runs_where_fewer_bytes_move(moved, output, on_host):
    assert embedding_runs_on_host(moved, output) is on_host


@quick
@given(nbytes, nbytes)
def test_the_choice_for_an_embedding_is_never_the_dearer_one(moved, output):
    taken = 2 * output if embedding_runs_on_host(moved, output) else moved
    assert taken == min(2 * output, moved)


def test_the_warm_up_leaves_the_papers_fifth():
    assert WARM_UP_PERCENT == 80
