"""Test the part of a budget that is left to fragmentation."""

from hypothesis import given
from hypothesis import strategies as st

from patrickstar._schedule.fragmentation import MIB, NO_FRAGMENTATION, PERCENT, Fragmentation

FRAGMENTATION = Fragmentation()
budgets = st.integers(0, 1 << 38) | st.integers(600 * MIB, 900 * MIB)


@given(budgets, st.integers(0, 1 << 30))
def test_a_larger_budget_has_no_smaller_part_that_is_planned(budget, more):
    assert FRAGMENTATION.planned_bytes(budget) <= FRAGMENTATION.planned_bytes(budget + more)


@given(budgets)
def test_what_is_reserved_stays_within_a_budget_that_is_large_against_the_pages(budget):
    limit, planned = FRAGMENTATION.reserved_limit_bytes(budget), FRAGMENTATION.planned_bytes(budget)
    assert limit <= max(budget, planned + FRAGMENTATION.page_bytes)
    assert limit - planned >= FRAGMENTATION.page_bytes, "some pages are always used in part"
    if budget * PERCENT >= 100 * FRAGMENTATION.page_bytes:
        assert limit == budget


@given(budgets)
def test_the_named_budget_is_the_smallest_of_which_so_much_is_planned(planned):
    budget = FRAGMENTATION.budget_bytes(planned)
    assert FRAGMENTATION.planned_bytes(budget) >= planned
    assert budget == 0 or FRAGMENTATION.planned_bytes(budget - 1) < planned


@given(budgets)
def test_an_allocator_without_a_limit_has_no_such_part(budget):
    assert NO_FRAGMENTATION.unplanned_bytes(budget) == 0 and NO_FRAGMENTATION.budget_bytes(budget) == budget
