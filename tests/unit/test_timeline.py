"""Recorder of a step, with a clock that the test sets."""

from patrickstar._tiers.timeline import Timeline


def test_a_product_that_is_recomputed_within_another_is_no_part_of_it():
    clock = {"now": 0.0}
    timeline = Timeline(lambda: clock["now"], None, [])
    for name, start_s, end_s in (("first", 1.0, 3.0), ("second", 2.0, 7.0), ("third", 8.0, 9.0)):
        clock["now"] = end_s
        timeline.product(name, 1, start_s, backward=True)
    assert {each.name: each.seconds for each in timeline.finish(1).products} == {"first": 2, "second": 4, "third": 1}
