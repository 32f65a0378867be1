"""Measured rates of products: short, in the layouts of autograd, of sizes that the time allows."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from patrickstar._dry_run import product_rates
from patrickstar._dry_run.product_rates import LIMIT_S, product_rate


def test_the_measurement_is_short_and_leaves_no_trace():
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(before + 1)
    try:
        found = {precision: product_rate(precision, 96, 200) for precision in ("fp32", "bf16", "fp16")}
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert all(rate > 0 for rate in found.values()) and 3 * LIMIT_S < 0.5
    assert torch.equal(torch.get_rng_state(), state)
    assert product_rate("fp32", 96, 200) == found["fp32"]  # all engines of a process agree


def test_products_have_the_layouts_of_autograd(monkeypatch):
    """A product may be a hundred times slower in one layout than in another."""

    class Layouts(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.products = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                self.products.append([(tuple(each.shape), each.stride()) for each in args])
            return func(*args, **kwargs or {})

    with Layouts() as measured:
        product_rate.__wrapped__("fp32", 24, 40)
    x, linear = torch.ones(64, 40, requires_grad=True), nn.Linear(40, 24, bias=False)
    with Layouts() as used:
        linear(x).backward(torch.ones(64, 24))
    assert sorted(measured.products[:3]) == sorted(used.products)


def test_the_sizes_of_products_follow_the_time_they_take(monkeypatch):
    """A product that takes as long as on a CPU without bf16 is not made larger."""
    sizes, now = [], [0.0]

    def products(dtype, rows, outputs, inputs):
        sizes.append((rows, outputs, inputs))

        def run():
            now[0] += 3 * 2 * rows * outputs * inputs / 0.75e9  # 6, 2 and 0.3 GFLOPS

        return run

    monkeypatch.setattr(product_rates, "_products", products)
    monkeypatch.setattr(product_rates, "time", SimpleNamespace(thread_time=lambda: now[0]))
    assert product_rate.__wrapped__("bf16", 3072, 768) == pytest.approx(0.75e9)
    assert sizes == [(64, 64, 64), (128, 128, 128)] and now[0] < LIMIT_S
