"""Which optimizer chunks live in the margin space, and where an embedding runs: formulas over bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.layout.lists import scheme_for
from patrickstar.layout.mapping import ChunkSpec, ParamSpec, build_layout
from patrickstar.schedule.placement import (
    WARM_UP_PERCENT,
    embedding_runs_on_host,
    margin_chunks,
    update_workspace_bytes,
)

quick = settings(derandomize=True, deadline=None, max_examples=300)

TRAINED, FROZEN = scheme_for("bfloat16", trained=True), scheme_for("bfloat16", trained=False)


def chunk(index, numel, scheme=TRAINED):
    return ChunkSpec(index, scheme, numel, numel, (f"p{index}",), private=False)


chunk_lists = st.lists(
    st.tuples(st.integers(1, 200).map(lambda n: 32 * n), st.sampled_from([TRAINED, FROZEN])), min_size=1, max_size=12
).map(lambda drawn: [chunk(index, numel, scheme) for index, (numel, scheme) in enumerate(drawn)])

nbytes = st.integers(0, 200_000)


@quick
@given(chunk_lists, nbytes, nbytes, st.integers(0, 20_000))
def test_placed_chunks_fit_into_the_margin_and_no_other_would_have(chunks, budget, peak, workspace):
    placed = margin_chunks(chunks, budget, peak, workspace)
    margin = budget - peak - workspace - sum(c.compute_bytes for c in chunks)
    assert placed == sorted(set(placed))
    for c in chunks:
        if c.index in placed:
            assert c.scheme.trained
            margin -= c.optimizer_bytes
            assert margin >= 0
        elif c.scheme.trained:
            assert c.optimizer_bytes > margin, f"{c} would have fitted"


@quick
@given(chunk_lists, nbytes, nbytes, st.integers(0, 20_000))
def test_parameters_come_first(chunks, budget, peak, workspace):
    if sum(c.compute_bytes for c in chunks) + peak + workspace >= budget:
        assert margin_chunks(chunks, budget, peak, workspace) == []


@quick
@given(chunk_lists, nbytes, nbytes)
def test_with_room_for_everything_all_trained_chunks_are_placed(chunks, peak, workspace):
    everything = sum(c.total_bytes for c in chunks) + peak + workspace
    assert margin_chunks(chunks, everything, peak, workspace) == [c.index for c in chunks if c.scheme.trained]
    trained = [c for c in chunks if c.scheme.trained]
    if trained:
        assert len(margin_chunks(chunks, everything - 1, peak, workspace)) == len(trained) - 1


def test_the_margin_by_hand():
    chunks = [chunk(0, 64), chunk(1, 320), chunk(2, 64, FROZEN), chunk(3, 64)]
    param16 = 2 * (64 + 320 + 64 + 64)
    one_small = 12 * 64
    assert margin_chunks(chunks, param16 + 100 + 10 + one_small, 100, 10) == [0]
    assert margin_chunks(chunks, param16 + 100 + 10 + one_small - 1, 100, 10) == []
    assert margin_chunks(chunks, param16 + 2 * one_small, 0, 0) == [0, 3], "the large one in between is passed over"
    assert margin_chunks(chunks, param16 + 12 * 384, 0, 0) == [0, 1]


def test_the_workspace_of_an_update_is_the_gradient_of_the_largest_parameter():
    assert update_workspace_bytes(chunk(0, 640), largest_param_numel=100, itemsize=4) == 400
    assert update_workspace_bytes(chunk(0, 64), largest_param_numel=100, itemsize=4) == 256
    assert update_workspace_bytes(chunk(0, 640, FROZEN), largest_param_numel=100, itemsize=4) == 0
    (private,) = build_layout([ParamSpec("p", 100, TRAINED)], 32).chunks
    assert update_workspace_bytes(private, largest_param_numel=100, itemsize=4) == 400


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
