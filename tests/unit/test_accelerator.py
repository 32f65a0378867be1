"""Properties of any accelerator: bf16 that is not emulated, and a default budget."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from patrickstar._memory.accelerator import Accelerator, default_budget

GIB = 1 << 30


@pytest.mark.parametrize(
    ("module", "has_it"),
    [
        (SimpleNamespace(is_bf16_supported=lambda including_emulation=True: including_emulation), False),
        (SimpleNamespace(is_bf16_supported=lambda including_emulation=True: True), True),
        (SimpleNamespace(is_bf16_supported=lambda: False), False),
        (SimpleNamespace(), True),
    ],
)
def test_an_accelerator_does_not_count_emulated_bf16(monkeypatch, module, has_it):
    monkeypatch.setattr(torch.accelerator, "device_index", nullcontext)
    accelerator = object.__new__(Accelerator)
    accelerator.module, accelerator.index = module, 0
    assert accelerator.has_bf16 is has_it


@pytest.mark.parametrize(
    ("free_bytes", "several", "expected"),
    [
        *((free * GIB, False, free * GIB - 3 * GIB // 2) for free in (80, 16)),
        *((free * GIB, True, free * GIB - 5 * GIB // 2) for free in (80, 16)),
        (2 * GIB, False, 2 * GIB * 60 // 100),
        (0, False, 0),
    ],
)
def test_default_budget_leaves_a_margin(free_bytes, several, expected):
    assert default_budget(free_bytes, several) == expected
    assert default_budget(free_bytes, several) <= default_budget(free_bytes)
