"""The probe of this machine times updates as the engine runs them: in pieces, with copies in both directions."""

import pytest
import strict_device
import torch

from patrickstar._dry_run.machine_profile import _update_rate
from patrickstar._kernels.dispatch import Kernels
from patrickstar._memory.hardware import Hardware
from patrickstar._perf_model.workload import UPDATE_BYTES
from patrickstar._step import streamed_update

NUMEL = 1 << 16


@pytest.mark.parametrize("slow", ["up", "down"])
def test_an_update_is_no_faster_than_its_copies(slow):
    rates = {"up": 1e9, "down": 1e9, slow: 1e6}
    strict_device.configure(timed=strict_device.Rates(**rates))
    rate = _update_rate(Hardware(torch.device("strict", 0)), NUMEL)
    assert 0 < rate / UPDATE_BYTES * 2 <= 1e6, "two bytes per parameter pass the link"


def test_an_update_reaches_the_kernel_in_the_pieces_of_a_step(monkeypatch):
    strict_device.configure()
    lengths = []
    start = Kernels.start

    def noted(self, spans, scales):
        lengths.extend(span.numel for span in spans)
        return start(self, spans, scales)

    monkeypatch.setattr(Kernels, "start", noted)
    monkeypatch.setattr(streamed_update, "PIECE_NUMEL", NUMEL // 4)
    _update_rate(Hardware(torch.device("strict", 0)), NUMEL)
    assert set(lengths) == {NUMEL // 4}
