"""Parsing and formatting of sizes in bytes."""

import re
from fractions import Fraction

from patrickstar.errors import ConfigError

_UNITS = {"b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS[f"{_prefix}ib"] = 1024**_power
    _UNITS[f"{_prefix}b"] = 1000**_power

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int) -> int:
    """Return the number of bytes of a size such as ``"2GiB"`` (powers of 1024) or ``"2GB"`` (powers of 1000).

    An int is a number of bytes. Raises ConfigError if `text` is not a positive size, or has no unit.
    """
    if isinstance(text, int):
        nbytes = text
    else:
        match = _PATTERN.fullmatch(text)
        if match is not None and not match[2]:
            raise ConfigError(f"{text!r} has no unit; write '{match[1]}GiB', or '{match[1]}B' for bytes")
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f"{text!r} is not a size; write a number with a unit, such as '512MiB'")
        nbytes = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if nbytes <= 0:
        raise ConfigError(f"a size must be positive, but {text!r} is not")
    return nbytes


def parse_size_field(text: str | int) -> int:
    """Return `parse_size` of a pydantic field, whose validators have to raise ValueError."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def format_size(nbytes: int) -> str:
    """Format a size with its largest binary unit, such as ``"1.50 GiB"``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
