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


def with_table(monkeypatch, tmp_path, text):
    table = tmp_path / "cpuinfo"
    if text is not None:
        table.write_text(text)
    monkeypatch.setattr(module, "Path", lambda path: table if path == "/proc/cpuinfo" else Path(path))
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda process: {0, 1})


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("avx2", "AMD EPYC, 2 cores, AVX2"),
        ("avx2 avx512f", "AMD EPYC, 2 cores, AVX-512"),
        ("avx2 avx512f avx512_bf16", "AMD EPYC, 2 cores, AVX-512 with bf16"),
        ("avx2 avx512f avx512_bf16 amx_bf16", "AMD EPYC, 2 cores, AMX"),
        ("", "AMD EPYC, 2 cores"),
    ],
)
def test_the_instruction_set_is_named(monkeypatch, tmp_path, flags, name):
    with_table(monkeypatch, tmp_path, TABLE.format(flags=flags))
    assert machine_name(CPU) == name


def test_arm_has_features_and_no_model_name(monkeypatch, tmp_path):
    with_table(monkeypatch, tmp_path, "processor\t: 0\nFeatures\t: fp asimd\n")
    assert re.fullmatch(r".+, 2 cores, NEON", machine_name(CPU))


def test_a_system_without_the_table_has_a_name(monkeypatch, tmp_path):
    with_table(monkeypatch, tmp_path, None)
    assert re.fullmatch(r".+, 2 cores", machine_name(CPU))
