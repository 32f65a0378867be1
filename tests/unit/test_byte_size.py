"""Sizes in bytes: exact parsing and readable formatting."""

from fractions import Fraction

import pytest
from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._layout.byte_size import format_size, parse_size
from patrickstar.errors import ConfigError

given = fixed_draws(300)

UNITS = {"B": 1}
UNITS |= {f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)}
UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("kMGT", 1)}
SIZES = {1: 1, "1.5 KiB": 1536, "  3 mb\t": 3_000_000, "0.25TIB": 1024**4 // 4, "9" * 400 + "B": int("9" * 400)}


@pytest.mark.parametrize(("text", "nbytes"), SIZES.items())
def test_a_size_is_read(text, nbytes):
    assert parse_size(text) == nbytes


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]), st.booleans())
def test_whole_numbers_of_any_unit_are_exact_in_any_case(number, unit, space, upper):
    written = unit.upper() if upper else unit.lower()
    assert parse_size(f"{number}{space}{written}") == number * UNITS[unit]


@given(st.integers(0, 9999), st.integers(0, 999), st.sampled_from(sorted(UNITS)))
def test_decimal_fractions_are_cut_to_whole_bytes(whole, thousandths, unit):
    number = f"{whole}.{thousandths:03d}"
    meant = int(Fraction(number) * UNITS[unit])
    if meant == 0:
        with pytest.raises(ConfigError, match="must be positive"):
            parse_size(number + unit)
    else:
        assert parse_size(number + unit) == meant


NO_SIZES = ["", " ", "GiB", "abc", "-1", "-2GiB", "+3", "1.5.2", "1,5 GiB", "0x10", "1_000", "inf", "2 Gi", "1 PiB"]
NO_BYTES = [0, -1, -(2**40), "0B", "0 GiB", "0.0MB", "0.0001KiB", "0.9B"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, r"is not a size; write .* such as '512MiB'") for text in (*NO_SIZES, ".5")),
        *((text, "must be positive") for text in NO_BYTES),
        *((f" {text} ", f"has no unit; write '{text}GiB', or '{text}B' for bytes") for text in ("2", "0", "1.5")),
    ],
)
def test_what_is_no_size_is_quoted_and_an_example_given(text, says):
    with pytest.raises(ConfigError, match=says) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def test_a_size_is_written():
    assert [format_size(nbytes) for nbytes in (0, 1, 1023)] == ["0 B", "1 B", "1023 B"]
    assert [format_size(nbytes) for nbytes in (1024, 1536, -1536)] == ["1.00 KiB", "1.50 KiB", "-1.50 KiB"]
    assert [format_size(nbytes) for nbytes in (5 << 20, 3 << 29)] == ["5.00 MiB", "1.50 GiB"]
    assert [format_size(nbytes) for nbytes in (1 << 40, 5000 << 40)] == ["1.00 TiB", "5000.00 TiB"]


@given(st.integers(1, 2**60))
def test_what_was_written_is_read_back_to_the_last_digit_shown(nbytes):
    text = format_size(nbytes)
    unit = UNITS[text.split()[1]]
    shown_within = 0 if unit == 1 else unit // 200 + 1
    assert abs(parse_size(text) - nbytes) <= shown_within
    assert float(text.split()[0]) <= 1024 or unit == UNITS["TiB"]
