"""Placement by bytes: initial tiers of chunks, margin, tiers of optimizer chunks, and embedding lookups."""

from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._layout.chunk_mapping import ChunkSpec
from patrickstar._layout.schema import schema_for
from patrickstar._layout.shard_group import ShardGroup
from patrickstar._schedule import placement as module
from patrickstar._schedule.placement import Budgets, ChunkTiers, Tier, disk_bytes, home_tiers, initial_placement

given = fixed_draws(300)

TRAINED, FROZEN = schema_for("bfloat16", trained=True), schema_for("bfloat16", trained=False)


def chunk(index, numel, schema=TRAINED):
    return ChunkSpec(index, schema, numel, numel, (f"p{index}",), private=False)


chunk_lists = st.lists(
    st.tuples(st.integers(1, 200).map(lambda n: 32 * n), st.sampled_from([TRAINED, FROZEN])), min_size=1, max_size=12
).map(lambda drawn: [chunk(index, numel, schema) for index, (numel, schema) in enumerate(drawn)])

nbytes = st.integers(0, 200_000)
shares = st.floats(0, 1.5)


def bytes_per_tier(chunks, placement):
    """Return the bytes on each tier according to the placement."""
    used = dict.fromkeys(Tier, 0)
    for c in chunks:
        used[placement[c.index].compute] += c.compute_bytes
        used[placement[c.index].optimizer] += c.optimizer_bytes
    return used


@given(chunk_lists, shares, shares)
def test_what_begins_on_a_tier_fits_it(chunks, device_share, host_share):
    total = sum(c.total_bytes for c in chunks)
    device, host = int(device_share * total), int(host_share * total)
    placement = initial_placement(chunks, Budgets(device, host))
    if placement is None:
        return
    assert list(placement) == [c.index for c in chunks]
    used = bytes_per_tier(chunks, placement)
    assert used[Tier.DEVICE] <= device
    assert used[Tier.HOST] <= host
    assert used[Tier.DISK] == 0
    assert sum(used.values()) == total


@given(chunk_lists, shares, shares, shares)
def test_the_disk_is_used_only_if_need_be_and_takes_no_more_than_it_has(chunks, device_share, host_share, disk_share):
    total = sum(c.total_bytes for c in chunks)
    device, host, disk = int(device_share * total), int(host_share * total), int(disk_share * 2 * total)
    placement = initial_placement(chunks, Budgets(device, host, disk))
    without = initial_placement(chunks, Budgets(device, host))
    if without is not None:
        assert placement == without
    elif placement is not None:
        assert list(placement) == [c.index for c in chunks]
        assert max(c.compute_bytes for c in chunks) <= device
        assert {tiers.compute for tiers in placement.values()} == {Tier.DEVICE}
        assert Tier.DEVICE not in {tiers.optimizer for tiers in placement.values()}
        used = bytes_per_tier(chunks, placement)
        below = sum(c.compute_bytes for c in chunks) + used[Tier.HOST]
        assert below <= host or not used[Tier.HOST], "param16 does not fit beside the optimizer chunks on the host"
        blocks = [c.compute_bytes for c in chunks]  # all of param16 may be evicted there
        for c in chunks:
            if placement[c.index].optimizer is Tier.DISK:
                blocks += [c.nbytes(spec.itemsize) for spec in c.schema.optimizer_lists]
        assert disk_bytes(chunks, placement) == sum(-(-nbytes // 4096) * 4096 for nbytes in blocks) <= disk


@given(chunk_lists, shares)
def test_a_disk_for_everything_needs_of_memory_one_chunk_on_the_device(chunks, host_share):
    everything = dict.fromkeys((c.index for c in chunks), ChunkTiers(Tier.DEVICE, Tier.DISK))
    disk, largest = disk_bytes(chunks, everything), max(c.compute_bytes for c in chunks)
    host = int(host_share * sum(c.total_bytes for c in chunks))
    assert initial_placement(chunks, Budgets(largest, host, disk)) is not None
    assert initial_placement(chunks, Budgets(largest - 1, host, disk)) is None
    if initial_placement(chunks, Budgets(largest, 0)) is None:
        assert initial_placement(chunks, Budgets(largest, 0, disk - 1)) is None


@given(chunk_lists, shares)
def test_with_a_host_for_everything_no_optimizer_chunk_begins_on_the_device(chunks, device_share):
    total, largest = sum(c.total_bytes for c in chunks), max(c.compute_bytes for c in chunks)
    device = largest + int(device_share * total)
    placement = initial_placement(chunks, Budgets(device, total + largest))
    assert placement is not None
    assert {tiers.optimizer for tiers in placement.values()} == {Tier.HOST}
    warm = sum(c.compute_bytes for c in chunks if placement[c.index].compute is Tier.DEVICE)
    assert warm <= device * module.WARM_UP_PERCENT // 100
    left_over = [c.compute_bytes for c in chunks if placement[c.index].compute is Tier.HOST]
    assert all(warm + nbytes > device * module.WARM_UP_PERCENT // 100 for nbytes in left_over)


def test_where_chunks_begin_by_hand():
    chunks = [chunk(0, 64), chunk(1, 64)]
    assert initial_placement(chunks, Budgets(10_000, 0)) is not None
    assert initial_placement(chunks, Budgets(0, 10_000)) is None, "no operator could run"
    assert initial_placement(chunks, Budgets(0, 10_000, 1 << 30)) is None, "a disk does not help"
    assert initial_placement(chunks, Budgets(128, 1536)) is None, "no room to exchange two chunks"
    chunks = [chunk(0, 64), chunk(1, 64), chunk(2, 64)]
    below = ChunkTiers(compute=Tier.DEVICE, optimizer=Tier.HOST)
    assert initial_placement(chunks, Budgets(480, 10_000)) == {0: below, 1: below, 2: below}
    placed = initial_placement(chunks, Budgets(479, 10_000))
    assert placed == {0: below, 1: below, 2: module.HOST}, "80 % of 479 is less than three"
    everything = ChunkTiers(compute=Tier.DEVICE, optimizer=Tier.DEVICE)
    assert initial_placement(chunks, Budgets(3 * 896, 0)) == {0: everything, 1: everything, 2: everything}


def test_where_chunks_begin_by_hand_if_there_is_a_disk():
    chunks = [chunk(0, 64), chunk(1, 64, FROZEN), chunk(2, 64)]
    below, on_disk = ChunkTiers(Tier.DEVICE, Tier.HOST), ChunkTiers(Tier.DEVICE, Tier.DISK)
    assert initial_placement(chunks, Budgets(128, 0, 1 << 20)) == {0: on_disk, 1: on_disk, 2: on_disk}
    room = 3 * 128 + 768  # all of param16, then the optimizer chunks of one index
    assert initial_placement(chunks, Budgets(128, room, 1 << 20)) == {0: below, 1: on_disk, 2: on_disk}
    assert initial_placement(chunks, Budgets(128, room - 1, 1 << 20)) == {0: on_disk, 1: on_disk, 2: on_disk}
    # One block per param16 chunk and per optimizer chunk of the last index; the swap file never grows beyond.
    assert disk_bytes(chunks, {0: below, 1: on_disk, 2: on_disk}) == (3 + 3) * 4096
    assert initial_placement(chunks, Budgets(128, room, 6 * 4096)) is not None
    assert initial_placement(chunks, Budgets(128, room, 6 * 4096 - 1)) is None


@given(chunk_lists, nbytes, st.booleans(), st.sets(st.integers(0, 3)))
def test_placed_chunks_fit_into_the_margin_and_no_other_would_have(chunks, chunkable, accumulates, on_host):
    placed = module.margin_chunks(chunks, chunkable, accumulates=accumulates, on_host=on_host)
    margin = chunkable - sum(c.compute_bytes for c in chunks)
    assert placed == sorted(set(placed))
    for c in chunks:
        needed = c.optimizer_bytes + (4 * c.numel if accumulates else 0)
        if c.index in placed:
            assert c.schema.trained
            assert c.index not in on_host
            margin -= needed
            assert margin >= 0
        elif c.schema.trained and c.index not in on_host:
            assert needed > margin, f"{c} would have fitted"


def test_sharded_chunks_leave_the_margin_what_is_not_gathered_at_a_time():
    group = ShardGroup.of(1, [range(4)])
    chunks = [
        ChunkSpec(index, TRAINED, 64, 64, (f"p{index}",), False, shard_bounds=(0, 16, 32, 48, 64), group=group)
        for index in range(8)
    ]
    each = chunks[0].optimizer_bytes + 16 * 2  # a shard follows its states
    for count in range(9):
        chunkable = 2 * 128 + count * each
        assert module.margin_chunks(chunks, chunkable, gathered_bytes=2 * 128) == list(range(count))
        whole = module.margin_chunks(chunks, chunkable)
        assert len(whole) == max(0, (chunkable - 8 * 128) // each), "without the bound, all are gathered"


@given(chunk_lists, nbytes, nbytes, st.booleans())
def test_optimizer_chunks_fill_the_margin_then_the_host_then_the_disk(chunks, chunkable, host, accumulates):
    above = module.margin_chunks(chunks, chunkable, accumulates=accumulates)
    found = home_tiers(chunks, above, host, accumulates=accumulates)
    assert list(found) == [c.index for c in chunks]
    needed = {c.index: c.optimizer_bytes + (4 * c.numel if accumulates and c.schema.trained else 0) for c in chunks}
    assert {index for index, tier in found.items() if tier is Tier.DEVICE} == set(above)
    left = host - sum(needed[index] for index, tier in found.items() if tier is Tier.HOST)
    assert left >= 0
    assert all(needed[index] > left for index, tier in found.items() if tier is Tier.DISK), "one would have fitted"


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 59), st.integers(1, 8))
def test_optimizer_chunks_on_the_host_are_spread_over_the_layers_and_stay_if_it_grows(count, first, room, more):
    chunks = [chunk(index, 64) for index in range(count)]
    each = chunks[0].optimizer_bytes
    found = [home_tiers(chunks, (), room * each + add) for add in (0, each - 1, more * each)]
    hosts = [{index for index, tier in tiers.items() if tier is Tier.HOST} for tiers in found]
    assert len(hosts[0]) == min(count, room) and hosts[0] == hosts[1] <= hosts[2]
    part = len([index for index in hosts[0] if first <= index < first + 13])
    within = len(range(first, min(first + 13, count)))
    assert abs(part - within * len(hosts[0]) / count) <= 3, "a part of the layers has other than its share"


@given(nbytes, nbytes)
def test_an_embedding_runs_where_fewer_bytes_move_and_on_the_device_if_they_are_equal(moved, output):
    """Its output is copied there, and its gradient back."""
    assert module.embedding_runs_on_host(moved, output) is (2 * output < moved)
    assert not module.embedding_runs_on_host(2 * output, output)
