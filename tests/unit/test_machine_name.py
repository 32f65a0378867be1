"""Names of machines tell generations of one processor apart."""

import re
from pathlib import Path

import pytest
import torch

from patrickstar._hardware import machine_name as module
from patrickstar._hardware.machine_name import machine_name

CPU = torch.device("cpu")
TABLE = """processor\t: 0
model name\t: AMD EPYC
flags\t\t: fpu avx {flags}

processor\t: 1
model name\t: another
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (TABLE.format(flags="avx2"), "AMD EPYC, 2 cores, AVX2"),
        (TABLE.format(flags="avx2 avx512f"), "AMD EPYC, 2 cores, AVX-512"),
        (TABLE.format(flags="avx2 avx512f avx512_bf16"), "AMD EPYC, 2 cores, AVX-512 with bf16"),
        (TABLE.format(flags="avx2 avx512f avx512_bf16 amx_bf16"), "AMD EPYC, 2 cores, AMX"),
        (TABLE.format(flags=""), "AMD EPYC, 2 cores"),
        # ARM has features and no model name; other systems have no such table.
        ("processor\t: 0\nFeatures\t: fp asimd\n", ".+, 2 cores, NEON"),
        (None, ".+, 2 cores"),
    ],
)
def test_the_instruction_set_is_named(monkeypatch, tmp_path, text, name):
    table = tmp_path / "cpuinfo"
    if text is not None:
        table.write_text(text)
    monkeypatch.setattr(module, "Path", lambda path: table if path == "/proc/cpuinfo" else Path(path))
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: {0, 1})
    assert re.fullmatch(name, machine_name(CPU))
