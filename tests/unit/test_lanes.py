"""Lanes of a simulated step: clipping, names of parameters, the picture, and tables of what is exposed."""

import pytest

from patrickstar._dry_run.lanes import Interval, Lane, Wait, clip, end_s, exposed_table, name_parameters, picture
from patrickstar._perf_model.text_tables import LINE_NAME_WIDTH, SPARKLINE_WIDTH, busy_line, mark_line

WAITS = (
    Wait(1.0, 0.5, "disk read", "param16[3]", "forward", "h.1.weight"),
    Wait(4.0, 2.0, "disk read", "param16[3]", "backward", "h.1.weight"),
    Wait(8.0, 0.25, "update on the host", "update", "step"),
    Wait(9.0, 0.5, "update on the host", "update", "step"),
)


def test_intervals_are_clipped_to_the_step_and_relative_to_its_start():
    intervals = [Interval(*times, "x") for times in ((0, 9), (8, 12), (13, 13), (14, 15), (19, 25), (20, 21))]
    assert clip(intervals, 10, 20) == (Interval(0, 2, "x"), Interval(4, 5, "x"), Interval(9, 10, "x"))


def test_waits_for_chunks_name_the_first_parameter():
    waits = [Wait(7.0, 1.0, "disk read", label, "forward") for label in ("param16[3]", "exp_avg[4]", "update")]
    named = name_parameters(waits, 5.0, {3: "h.1.weight"})
    assert [(wait.start_s, wait.parameter) for wait in named] == [(2.0, "h.1.weight"), (2.0, ""), (2.0, "")]


def test_a_busy_line_shows_the_share_of_each_part_of_the_time():
    seconds = float(SPARKLINE_WIDTH)  # a second per character
    line = busy_line([(0.0, 2.0), (2.5, 3.0), (4.0, 4.01), (5.0, 5.25), (5.5, 5.75), (59.0, 60.0)], seconds)
    assert len(line) == SPARKLINE_WIDTH
    assert line[:7] == "██▄ ▁▄ " and line[-2:] == " █"
    assert mark_line([(0.0, 1.5), (3.9, 4.0)], seconds).rstrip() == "^^ ."
    assert busy_line([], seconds) == mark_line([], seconds) == " " * SPARKLINE_WIDTH
    assert busy_line([(0.0, 0.0)], 0.0) == ""


@pytest.mark.parametrize("count", [1, 7, 60, 61, 1000])
def test_adjacent_intervals_are_drawn_as_one(count):
    spans = [(0.3 * part / count, 0.3 * (part + 1) / count) for part in range(count)]
    assert busy_line(spans, 0.3) == "█" * SPARKLINE_WIDTH


def test_a_picture_has_a_line_per_used_lane_and_marks_waits():
    lanes = (
        Lane("compute", (Interval(0.0, 5.0, "forward"),)),
        Lane("disk read", (Interval(5.0, 10.0, "param16[0]"),)),
        Lane("disk write", ()),
    )
    waits = (Wait(5.0, 5.0, "disk read", "param16[0]", "step"),)
    half = SPARKLINE_WIDTH // 2
    assert end_s(lanes, waits) == 10.0 and end_s((), ()) == 0.0
    title, *lines = picture(lanes, waits).splitlines()
    assert "^" in title
    assert lines == [
        f"  {'compute':<{LINE_NAME_WIDTH}}" + "█" * half + " " * half,
        f"  {'disk read':<{LINE_NAME_WIDTH}}" + " " * half + "█" * half,
        f"  {'compute waits':<{LINE_NAME_WIDTH}}" + " " * half + "^" * half,
    ]


def test_what_is_exposed_is_summed_by_channel_and_by_name_the_longest_first():
    cells = [line.split() for line in exposed_table(WAITS, 10.0).splitlines()]
    assert cells[0] == "exposed: compute waits 3.25 s, 32% of the step".split()  # noqa: SIM905
    assert cells[2] == ["disk", "read", "2.50", "s", "25%", "500.00", "ms", "2.00", "s"]
    assert cells[3] == ["update", "on", "the", "host", "750.00", "ms", "8%", "750.00", "ms"]
    longest = [line.split() for line in exposed_table(WAITS, 10.0).splitlines()[6:]]
    assert longest[0] == "2.00 s 1 param16[3] disk read backward 4.00 s h.1.weight".split()  # noqa: SIM905
    assert longest[1] == "750.00 ms 2 update update on the host step 8.00 s".split()  # noqa: SIM905
    assert len(longest) == 3


def test_without_waits_one_line_says_so():
    assert exposed_table((), 10.0) == "exposed: nothing, compute never waits"
