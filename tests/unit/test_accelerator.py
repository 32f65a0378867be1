"""Properties of any accelerator: bf16 that is not emulated."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from patrickstar._hardware.accelerator import TorchDevice


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
    accelerator = object.__new__(TorchDevice)
    accelerator.module, accelerator.index = module, 0
    assert accelerator.has_bf16 is has_it
