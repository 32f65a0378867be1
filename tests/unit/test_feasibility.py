"""Budget check: the budgets named in the error suffice, and one byte less does not."""

import re

from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._layout.byte_size import format_size
from patrickstar._layout.chunk_mapping import ALIGN_NUMEL, ParamSpec, build_layout
from patrickstar._layout.schema import schema_for
from patrickstar._layout.shard_group import ShardGroup
from patrickstar._schedule.feasibility import check_budgets, smallest_accepted, working_set_bytes
from patrickstar._schedule.placement import Budgets, ChunkTiers, Tier, disk_bytes, initial_placement
from patrickstar.errors import BudgetError

given = fixed_draws(200)

SCHEMAS = [schema_for(dtype, trained) for dtype in ("bfloat16", "float32") for trained in (True, False)]
AMPLE = 1 << 50

shares = st.floats(0, 1.5)


@st.composite
def cases(draw):
    """Draw a layout and the sets of parameters that operators read: each parameter alone, and some more sets."""
    numels = draw(st.lists(st.tuples(st.integers(1, 1200), st.sampled_from(SCHEMAS)), min_size=1, max_size=10))
    params = [ParamSpec(f"p{i}", numel, schema) for i, (numel, schema) in enumerate(numels)]
    names = [param.name for param in params]
    operators = [{name} for name in names] + draw(st.lists(st.sets(st.sampled_from(names), max_size=3), max_size=3))
    return build_layout(params, draw(st.integers(1, 1200))), operators


def refusal(case, device_bytes: int, host_bytes: int, disk_bytes: int = 0, staging: int = 0) -> BudgetError | None:
    """Return the error of `check_budgets` for these budgets, or None."""
    try:
        check_budgets(*case, Budgets(device_bytes, host_bytes, disk_bytes), staging, with_disk=staging > 0)
    except BudgetError as error:
        return error
    return None


def budgets(case, device_share: float, host_share: float) -> tuple[int, int]:
    total = case[0].model_data_bytes
    return int(device_share * total), int(host_share * total)


def named(error: BudgetError) -> tuple[int, tuple[int, int]]:
    """Return the budgets named in an error: the device budget for this host, and a sufficient pair."""
    alone = re.search(r"device_memory=(\d+) bytes .*with this host_memory", str(error))
    pair = re.search(r"device_memory=(\d+) with host_memory=(\d+) bytes", str(error))
    assert alone and pair, error
    return int(alone[1]), (int(pair[1]), int(pair[2]))


@given(cases())
def test_the_working_set_is_that_of_the_most_demanding_operator(case):
    layout, operators = case
    chunks = {name: chunk for chunk in layout.chunks for name in chunk.params}
    needs = [{chunks[name].index: chunks[name].compute_bytes for name in names} for names in operators]
    assert working_set_bytes(layout, operators) == max(sum(need.values()) for need in needs)


@given(cases(), shares, shares)
def test_a_refusal_says_all_bytes_and_names_budgets_of_which_one_less_does_not_work(case, device_share, host_share):
    device, host = budgets(case, device_share, host_share)
    error = refusal(case, device, host)
    if error is None:
        return
    with_this_host, (with_device, with_host) = named(error)
    assert refusal(case, with_this_host, host) is None
    assert refusal(case, with_this_host - 1, host) is not None
    assert error.short_bytes == with_this_host - device > 0
    assert refusal(case, with_device, with_host) is None
    if with_host:
        assert refusal(case, with_device, with_host - 1) is not None
    if with_device > device:
        assert refusal(case, with_device - 1, AMPLE) is not None
    total = case[0].model_data_bytes
    assert f"the model data of {total} bytes ({format_size(total)}) does not fit" in str(error)
    assert f"a device budget of {device} bytes ({format_size(device)})" in str(error)
    assert f"a host budget of {host} bytes ({format_size(host)})" in str(error)
    assert f"needs {working_set_bytes(*case)} bytes at once" in str(error)
    assert "With less, add a disk: ps.Config(disk=ps.Disk(directory))" in str(error)


@given(cases(), shares, shares, shares, st.integers(0, 1000))
def test_more_memory_or_a_disk_is_never_refused_where_less_was_not(case, device_share, host_share, disk_share, more):
    device, host = budgets(case, device_share, host_share)
    if refusal(case, device, host) is None:
        assert refusal(case, device + more, host) is None
        assert refusal(case, device, host + more) is None
        assert refusal(case, device, host, int(disk_share * disk_for_everything(case))) is None


def disk_for_everything(case) -> int:
    layout, _ = case
    return disk_bytes(layout.chunks, {chunk.index: ChunkTiers(Tier.DEVICE, Tier.DISK) for chunk in layout.chunks})


@given(cases(), shares)
def test_with_memory_or_a_disk_for_everything_the_device_needs_its_working_set_alone(case, host_share):
    """And with such a disk the host needs nothing."""
    working_set, everything, disk = working_set_bytes(*case), case[0].model_data_bytes, disk_for_everything(case)
    assert refusal(case, working_set, everything) is None
    assert refusal(case, everything + working_set, 0) is None
    assert refusal(case, working_set - 1, AMPLE) is not None
    _, host = budgets(case, 0, host_share)
    assert refusal(case, working_set, host, disk) is None
    assert refusal(case, working_set - 1, host, disk) is not None


@given(cases(), shares, shares, shares, st.integers(-3000, 0), st.integers(1, 5000))
def test_a_refusal_with_a_disk_says_all_bytes_and_what_suffices(
    case, device_share, host_share, disk_share, lacks, staging
):
    device, host = budgets(case, device_share, host_share)
    device = min(device, 2 * working_set_bytes(*case))
    host = lacks if host_share < 0.3 else host  # staging buffers may need more than the budget
    disk = 1 + int(disk_share * disk_for_everything(case))
    error = refusal(case, device, host, disk, staging)
    if error is None:
        return
    assert f"a device budget of {device} bytes" in str(error)
    assert f"a host budget of {host + staging} bytes" in str(error), "the user's budget, with staging buffers"
    assert f"a disk of {disk} bytes ({format_size(disk)})" in str(error)
    assert f"needs {working_set_bytes(*case)} bytes at once" in str(error)
    raised, named_bytes = {"device_memory=": device, "host_memory=": host + staging, "a disk with ": disk}, []
    for label, budget in raised.items():
        if found := re.search(rf"{label}(\d+) bytes", str(error)):
            raised[label] = int(found[1])
            named_bytes.append(raised[label] - budget)
    assert error.short_bytes == max(named_bytes) and min(named_bytes) > 0, "a sufficient budget must not be requested"
    with_device, with_host, with_disk = raised.values()
    assert refusal(case, with_device, with_host - staging, with_disk, staging) is None


def test_a_disk_is_used_too_where_memory_holds_all_but_leaves_operators_no_room():
    """Optimizer chunks forced onto the device would leave too little room for the working set."""
    schema = schema_for("bfloat16", trained=True)
    params = [ParamSpec(f"p{i}", ALIGN_NUMEL, schema) for i in range(9)]
    layout, operators = build_layout(params, 1), [{"p0", "p1"}]
    param16, states = 2 * ALIGN_NUMEL, 12 * ALIGN_NUMEL
    device, host, disk = states + param16, 8 * states + 9 * param16, 1 << 20
    assert initial_placement(layout.chunks, Budgets(device, host)) is not None
    assert refusal((layout, operators), device, host) is not None
    assert refusal((layout, operators), device, host, disk, 1) is None


@given(st.integers(0, 200), st.integers(0, 200))
def test_the_smallest_accepted_number_is_found(threshold, upper):
    assert smallest_accepted(lambda number: number >= threshold, upper) == min(threshold, upper)


def test_with_a_disk_the_host_needs_one_shard_of_the_parameters():
    group = ShardGroup.of(1, [(0, 1)])
    params = [ParamSpec(f"p{i}", 1024, schema_for("bfloat16", trained=True), group=group) for i in range(8)]
    case, shard = (build_layout(params, 1024), [{param.name} for param in params]), 2 * 1024
    assert sum(chunk.shard_bytes for chunk in case[0].chunks) == 4 * shard
    disk = disk_for_everything(case)
    assert disk == 4 * 16 * 1024, "the pages of a list are whole blocks"
    assert refusal(case, 2 * shard, shard, disk, 1) is None
    error = refusal(case, 2 * shard, shard - 1, disk, 1)
    assert error is not None and "shards of the parameters" in str(error) and error.short_bytes == 1


def test_the_shard_of_a_replica_is_part_of_the_host_budget():
    group = ShardGroup.of(0, [(0, 2, 1, 3)], 2)
    params = [ParamSpec(f"p{i}", 1024, schema_for("bfloat16", trained=True), group=group) for i in range(4)]
    case = build_layout(params, 1024), [{param.name} for param in params]
    parts, shard = 14 * 1024, 2 * 2 * 1024
    assert case[0].model_data_bytes == parts + shard
    assert refusal(case, 2 * 4 * 1024, parts + shard) is None
    error = refusal(case, 2 * 4 * 1024, parts + shard - 1)
    assert error is not None and named(error)[1][1] == parts + shard
