"""Errors in the words of the command line: options in place of arguments, and one size for each number of bytes."""

import re

_SIZES = "device_memory|host_memory|chunk_size"
_OTHERS = "max_staleness|capacity_factor|host_bandwidth|cores|batch|sequence|gpus|gpu|machine|nodes|tp|ep|replicas"
_UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_SIZE = re.compile(rf"\b({_SIZES})=(\d+)(?: bytes)?(?: \([^)]*B\))?")
_REPLACED = (
    (re.compile(rf"\b({_SIZES}|{_OTHERS})=(?:'([^']*)'|([\w.]+))"), r"--\1 \2\3"),
    (re.compile(r"ps\.Config\(disk=ps\.Disk\(directory\)\)|\bdisk=ps\.Disk\(directory\)"), "--disk DIRECTORY"),
    (re.compile(r"\b(activation_checkpointing|activation_offload|tiled_loss|tiled_mlp)=True"), r"--\1"),
    (re.compile(r"\bprecision=['\"](\w+)['\"]"), r"--precision \1"),
    (re.compile(rf"(?<![\w-])({_SIZES})\b"), r"--\1"),
    (re.compile(r"\b\d+ bytes \(([\d.]+ [KMGT]?i?B)\)"), r"\1"),
)
"""Patterns in their order, and their replacements. The last is of bytes that are given as a size, too."""


def in_options(message: str) -> str:
    """Return the message of an error in the words of the command line."""
    message = _SIZE.sub(lambda found: f"--{found[1]} {_rounded_up(int(found[2]))}", message)
    for pattern, option in _REPLACED:
        message = pattern.sub(option, message)
    return re.sub(r"--\w+", lambda name: name[0].replace("_", "-"), message)


def _rounded_up(nbytes: int) -> str:
    """Return a size to type that is at least `nbytes`."""
    unit, name = next(each for each in _UNITS if nbytes >= each[0] or each[0] == 1)
    return f"{-(-nbytes // unit)}{name}"
