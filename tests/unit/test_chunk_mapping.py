"""Invariants of every layout, for arbitrary parameters and chunk sizes."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._layout.chunk_mapping import ALIGN_NUMEL, Layout, ParamSpec, align, build_layout
from patrickstar._layout.schema import schema_for
from patrickstar._layout.shard_group import ShardGroup
from patrickstar.errors import ModelError

given = fixed_draws(200)

TRAINED16 = schema_for("bfloat16", trained=True)
FROZEN16 = schema_for("float16", trained=False)
TRAINED32 = schema_for("float32", trained=True)
SCHEMAS = [TRAINED16, FROZEN16, TRAINED32]

chunk_numels = st.integers(1, 1200)
any_numel = st.integers(0, 1600)
meshes = st.sampled_from([(2, 2), (2, 1), (1, 2), (1, 3), (1, 4), (3, 2), (2, 3)])
"""Numbers of replicas and of shards."""


def parameters(schemas=SCHEMAS, numels=any_numel, **sizes):
    one = st.tuples(numels, st.sampled_from(schemas), st.booleans())
    return st.lists(one, **{"max_size": 25} | sizes).map(
        lambda drawn: [ParamSpec(f"p{i}", numel, schema, alone) for i, (numel, schema, alone) in enumerate(drawn)]
    )


def check_sound(layout: Layout, params: list[ParamSpec]) -> None:
    """Check that each parameter is aligned, inside one chunk of its schema, and overlaps no other."""
    chunks = {chunk.index: chunk for chunk in layout.chunks}
    assert len(chunks) == len(layout.chunks) == layout.chunk_count
    assert {name for chunk in layout.chunks for name in chunk.params} == {param.name for param in params}
    assert sum(len(chunk.params) for chunk in layout.chunks) == len(params)
    for param in params:
        location = layout.locations[param.name]
        chunk = chunks[location.chunk]
        assert param.name in chunk.params
        assert chunk.schema == param.schema
        assert location.numel == param.numel
        assert location.offset % ALIGN_NUMEL == 0
        assert location.offset >= 0 and location.offset + location.numel <= chunk.numel
    for chunk in layout.chunks:
        assert chunk.numel % ALIGN_NUMEL == 0
        ends = 0
        for location in (layout.locations[name] for name in chunk.params):
            assert location.offset >= ends, "two parameters overlap, or a chunk's are not in order"
            ends = location.offset + location.numel


@pytest.mark.parametrize(("numel", "aligned"), [(0, 0), (1, 128), (127, 128), (128, 128), (129, 256), (1000, 1024)])
def test_alignment_rounds_up(numel, aligned):
    assert align(numel) == aligned


@given(parameters(), chunk_numels)
def test_no_parameter_straddles_or_overlaps(params, chunk_numel):
    check_sound(build_layout(params, chunk_numel), params)


@given(parameters(), chunk_numels, meshes, st.booleans())
def test_shards_of_replicas_are_aligned_too(params, chunk_numel, mesh, grouped):
    replicas, shards = mesh
    size, stored_bytes = replicas * shards, 0
    for rank in range(size):
        replica, shard = divmod(rank, shards)
        order = [other * shards + place for place in range(shards) for other in range(replicas)]
        group = ShardGroup.of(rank, [order], replicas)
        assert group.position == shard * replicas + replica
        assert [group.ranks[position] // shards for position in group.replicate_positions] == list(range(replicas))
        assert {group.ranks[position] % shards for position in group.replicate_positions} == {shard}
        layout = build_layout([replace(param, group=group) for param in params], chunk_numel, grouped=grouped)
        for name, location in layout.locations.items():
            own, first = layout.local_location(name)
            assert location.offset % ALIGN_NUMEL == own.offset % ALIGN_NUMEL == 0
            assert first % ALIGN_NUMEL == 0, "a rank's shard of a parameter is not aligned"
        for chunk in layout.chunks:
            assert all(bound % ALIGN_NUMEL == 0 for bound in chunk.shard_bounds)
            ends = chunk.node.start, chunk.node.stop
            assert chunk.node.start <= chunk.own.start <= chunk.own.stop <= chunk.node.stop or replicas == 1
            if grouped:
                assert ends == ((0, 0) if replicas == 1 else tuple(chunk.numel // shards * (shard + k) for k in (0, 1)))
            itemsize = chunk.schema.compute.itemsize
            assert chunk.shard_bytes == (chunk.own_numel + chunk.node_numel) * itemsize
            assert chunk.total_bytes == chunk.shard_bytes + chunk.optimizer_bytes
        assert layout.padding_bytes >= 0
        stored_bytes += layout.model_data_bytes - layout.padding_bytes
    copies, schemas = replicas if replicas > 1 else 0, [param.schema for param in params]
    nbytes = [schema.bytes_per_param + copies * schema.compute.itemsize for schema in schemas]
    assert stored_bytes == sum(param.numel * each for param, each in zip(params, nbytes, strict=True))


@given(parameters(), chunk_numels)
def test_creation_order_inside_a_schema(params, chunk_numel):
    layout = build_layout(params, chunk_numel)
    private = {chunk.index for chunk in layout.chunks if chunk.private}
    for schema in SCHEMAS:
        locations = [layout.locations[param.name] for param in params if param.schema == schema]
        shared = [(location.chunk, location.offset) for location in locations if location.chunk not in private]
        assert shared == sorted(shared)
    opened = [layout.locations[chunk.params[0]] for chunk in layout.chunks]
    assert [location.chunk for location in opened] == list(range(len(layout.chunks)))


@given(parameters(), chunk_numels)
def test_private_chunks_are_for_the_oversize_and_for_those_that_ask(params, chunk_numel):
    layout = build_layout(params, chunk_numel)
    by_name = {param.name: param for param in params}
    for chunk in layout.chunks:
        if chunk.private:
            (name,) = chunk.params
            assert by_name[name].alone or by_name[name].numel > layout.chunk_numel
            assert chunk.numel == align(by_name[name].numel)
        else:
            assert not any(by_name[name].alone for name in chunk.params)
            assert chunk.numel <= layout.chunk_numel == align(chunk_numel)


@given(parameters(), chunk_numels)
def test_shared_chunks_are_full_but_the_last_which_is_trimmed(params, chunk_numel):
    layout = build_layout(params, chunk_numel)
    for schema in SCHEMAS:
        shared = [chunk for chunk in layout.chunks if chunk.schema == schema and not chunk.private]
        for chunk in shared:
            assert chunk.used == sum(align(layout.locations[name].numel) for name in chunk.params)
        for chunk, following in pairwise(shared):
            newcomer = layout.locations[following.params[0]].numel
            assert chunk.numel == layout.chunk_numel
            assert chunk.used + align(newcomer) > layout.chunk_numel, "a chunk was opened without need"
        if shared:
            assert shared[-1].numel == shared[-1].used


@pytest.mark.parametrize(("schema", "nbytes", "compute"), [(TRAINED16, 14, 2), (FROZEN16, 2, 2), (TRAINED32, 16, 4)])
@given(st.data(), chunk_numels)
def test_bytes_are_a_closed_formula(schema, nbytes, compute, data, chunk_numel):
    params = data.draw(parameters([schema]))
    layout = build_layout(params, chunk_numel)
    numel = sum(param.numel for param in params)
    on_chunks = sum(chunk.numel for chunk in layout.chunks)
    assert layout.numel == numel
    assert layout.model_data_bytes == nbytes * numel + layout.padding_bytes
    assert layout.padding_bytes == nbytes * (on_chunks - numel)
    assert layout.param16_bytes == compute * on_chunks
    assert layout.optimizer_bytes == (nbytes - compute) * on_chunks


def test_a_duplicate_name_is_refused():
    with pytest.raises(ModelError, match=r"'net\.weight'"):
        build_layout([ParamSpec("net.weight", 8, TRAINED16), ParamSpec("net.weight", 8, FROZEN16)], 64)


@given(parameters(), chunk_numels, st.data())
def test_extended_moves_some_and_leaves_the_others_where_they_are(params, chunk_numel, data):
    if not params:
        params = [ParamSpec("only", 3, FROZEN16)]
    layout = build_layout(params, chunk_numel)
    chosen = data.draw(st.sets(st.sampled_from([param.name for param in params])))
    moved = [ParamSpec(param.name, param.numel, TRAINED16) for param in params if param.name in chosen]
    moved.append(ParamSpec("new", 7, TRAINED16))
    grown = layout.extended(moved)
    stayed = [param for param in params if param.name not in chosen]
    check_sound(grown, stayed + moved)
    last = max(chunk.index for chunk in layout.chunks)
    old = {chunk.index: chunk for chunk in layout.chunks}
    assert all(grown.locations[param.name].chunk > last for param in moved)
    assert all(grown.locations[param.name] == layout.locations[param.name] for param in stayed)
    assert [chunk.index for chunk in grown.chunks] == sorted(chunk.index for chunk in grown.chunks)
    for chunk in grown.chunks:
        assert chunk.params, "an empty chunk was kept"
        if chunk.index in old:
            assert (chunk.numel, chunk.schema) == (old[chunk.index].numel, old[chunk.index].schema)
    payload = sum(param.numel * param.schema.bytes_per_param for param in stayed + moved)
    assert grown.model_data_bytes == payload + grown.padding_bytes
    assert layout.extended([]) == layout
