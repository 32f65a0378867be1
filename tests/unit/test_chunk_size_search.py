"""Chunk-size search compared with an exhaustive search of its range."""

from hypothesis import strategies as st
from sampling import fixed_draws
from test_chunk_mapping import parameters

from patrickstar._layout import chunk_size_search
from patrickstar._layout.chunk_mapping import ALIGN_NUMEL, ParamSpec, align, build_layout
from patrickstar._layout.chunk_size_search import largest_useful_numel, search_layout
from patrickstar._layout.schema import schema_for

given = fixed_draws(100)

SCHEMAS = [schema_for(dtype, trained) for dtype in ("bfloat16", "float32") for trained in (True, False)]
BUDGET = 1 << 40


@given(parameters(SCHEMAS, st.integers(1, 1600), min_size=1, max_size=12), st.integers(1, 1 << 17))
def test_no_size_of_the_range_wastes_less_and_no_larger_one_as_little(params, budget_bytes):
    upper = largest_useful_numel(params, budget_bytes)
    layout = search_layout(params, budget_bytes)
    sizes = range(ALIGN_NUMEL, upper + 1, ALIGN_NUMEL)
    padding = {size: build_layout(params, size).padding_bytes for size in sizes if 2 * size >= upper}
    smallest = min(padding.values())
    assert layout.padding_bytes == smallest
    assert layout.chunk_numel == max(size for size, nbytes in padding.items() if nbytes == smallest)


@given(parameters(SCHEMAS, st.integers(1, 1 << 22), min_size=1, max_size=30), st.integers(1 << 10, 1 << 32))
def test_large_sizes_stay_in_the_range_and_waste_no_more_than_its_upper_end(params, budget_bytes):
    upper = largest_useful_numel(params, budget_bytes)
    layout = search_layout(params, budget_bytes)
    assert upper <= 2 * layout.chunk_numel <= 2 * upper
    assert layout.padding_bytes <= build_layout(params, upper).padding_bytes


@given(parameters(SCHEMAS, st.integers(1, 1 << 26), min_size=1, max_size=30), st.integers(1, BUDGET))
def test_the_largest_useful_size(params, budget_bytes):
    upper = largest_useful_numel(params, budget_bytes)
    itemsize = max(param.schema.compute.itemsize for param in params)
    assert upper % ALIGN_NUMEL == 0 and upper >= ALIGN_NUMEL
    if upper > ALIGN_NUMEL:
        assert chunk_size_search.PIPELINE_CHUNKS * upper * itemsize <= budget_bytes
        assert upper * itemsize <= chunk_size_search.LARGEST_CHUNK_BYTES
        assert upper <= sum(align(param.numel) for param in params)


def test_each_bound_binds():
    schema = schema_for("bfloat16", trained=True)
    small, large = [ParamSpec("p", 100, schema)], [ParamSpec("p", 1 << 30, schema)]
    assert largest_useful_numel(small, BUDGET) == 128
    assert largest_useful_numel(large, BUDGET) == chunk_size_search.LARGEST_CHUNK_BYTES // 2
    assert largest_useful_numel(large, 1 << 20) == (1 << 20) // chunk_size_search.PIPELINE_CHUNKS // 2
    assert largest_useful_numel(large, 1) == ALIGN_NUMEL
