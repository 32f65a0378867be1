"""Dry runs: errors, values of integer tensors, and dry runs of an existing engine."""

import pytest
import torch
from torch import nn

import patrickstar as ps
from patrickstar import Engine
from patrickstar._dry_run.op_tracer import TensorMeter
from patrickstar._dry_run.simulation import copy_to_meta, simulate
from patrickstar._perf_model.machine_spec import Host, Machine
from patrickstar.errors import BudgetError, ModelError

LAPTOP = Machine(
    name="laptop",
    source="made up",
    host=Host(memory="64GiB", memory_bandwidth="20GB", cores=2, matmul_tflops=0.2),
)
CONFIG = ps.Config(device="cpu", device_memory="64MiB", host_memory="1GiB")


class Branching(nn.Module):
    """Module that branches on the value of a tensor."""

    def __init__(self, about: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.about = about

    def forward(self, x, positions):
        y = self.linear(x)
        if self.about == "integers" and (positions.diff() == 1).all():
            return y * 2
        if self.about == "numbers" and y.sum() > 0:
            return y * 2
        return y


def once(engine):
    x, positions = torch.empty(4, 8, device="meta"), torch.arange(4)
    engine.backward(engine(x, positions).float().mean())
    engine.optimizer.step()


def test_integer_values_are_computed():
    def build() -> nn.Module:
        return nn.Sequential(Branching("integers")).get_submodule("0")

    assert simulate(Engine, build, CONFIG, once, LAPTOP).seconds > 0


def test_reading_a_float_value_raises_and_names_the_module():
    with pytest.raises(ModelError, match=r"module 'inner' \(Branching\) cannot run on meta tensors.*without a dry run"):

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Branching("numbers")

            def forward(self, *args):
                return self.inner(*args)

        simulate(Engine, Outer, CONFIG, once, LAPTOP)


def test_a_model_that_does_not_fit_raises_the_error_of_a_real_run():
    small = ps.Config(device="cpu", device_memory=64, host_memory=64)
    with pytest.raises(BudgetError, match="does not fit") as caught:
        simulate(Engine, lambda: Branching("integers"), small, once, LAPTOP)
    with pytest.raises(BudgetError) as run:
        ps.initialize(lambda: Branching("integers"), small)
    assert caught.value.short_bytes == run.value.short_bytes


def test_planning_does_not_change_a_running_engine():
    torch.manual_seed(0)
    engine, optimizer = ps.initialize(lambda: Branching("integers"), CONFIG)
    x, positions = torch.randn(4, 8), torch.arange(4)
    before, random = engine.state_dict(), torch.get_rng_state()
    report = engine.plan(x, positions, loss=lambda out: out.float().mean())
    assert report.seconds >= report.bound_s > 0
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()), "the random state must not change"
    assert "where the time goes" in str(report) and "nothing was trained" in str(report)
    engine.backward(engine(x, positions).float().mean())
    optimizer.step()
    assert engine.stats.last.device_peak_model_bytes == report.stats.device_peak_model_bytes
    engine.close()


def test_a_meta_copy_keeps_ties_and_frozen_parameters():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    copied = copy_to_meta(model)
    assert copied["b"].weight is copied["a"].weight and copied["a"].weight.is_meta
    assert not copied["a"].bias.requires_grad and copied["b"].bias.requires_grad
    assert not model["a"].weight.is_meta


def test_memory_is_counted_until_its_last_tensor_is_freed():
    meter = TensorMeter()
    tensor = torch.empty(1000, device="meta")
    meter.track(tensor)
    view = tensor[:10]
    meter.track(view)
    assert meter.now(0) == meter.peak(0) == 4000
    del tensor
    assert meter.now(0) == 4000
    del view
    assert (meter.now(0), meter.peak(0)) == (0, 4000)
    meter.restart()
    assert meter.peak(0) == 0
