"""What a rehearsal refuses, and what of a model's questions it can answer."""

import pytest
import torch
from torch import nn

import patrickstar as ps
from patrickstar._dry_run.op_tracer import TensorMeter
from patrickstar._dry_run.simulation import copy_to_meta
from patrickstar._engine.dry_run import dry_run
from patrickstar._perf_model.machine_spec import Host, Machine
from patrickstar.errors import BudgetError, ModelError

LAPTOP = Machine(
    name="laptop",
    source="made up",
    host=Host(memory="64GiB", memory_bandwidth="20GB", cores=2, matmul_tflops=0.2),
)
CONFIG = ps.Config(device="cpu", device_memory="64MiB", host_memory="1GiB")


class Asks(nn.Module):
    """Goes on as a value says."""

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


def test_what_follows_from_whole_numbers_is_known():
    assert dry_run(lambda: nn.Sequential(Asks("integers")).get_submodule("0"), CONFIG, once, LAPTOP).seconds > 0


def test_what_only_a_run_knows_is_refused_and_the_module_is_named():
    with pytest.raises(ModelError, match=r"module 'inner' \(Asks\) cannot run on meta tensors.*without a dry run"):

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Asks("numbers")

            def forward(self, *args):
                return self.inner(*args)

        dry_run(Outer, CONFIG, once, LAPTOP)


def test_what_does_not_fit_is_refused_as_by_a_run():
    small = ps.Config(device="cpu", device_memory=64, host_memory=64)
    with pytest.raises(BudgetError, match="does not fit") as caught:
        dry_run(lambda: Asks("integers"), small, once, LAPTOP)
    with pytest.raises(BudgetError) as run:
        ps.initialize(lambda: Asks("integers"), small)
    assert caught.value.short_bytes == run.value.short_bytes


def test_a_running_engine_tells_what_a_step_takes_and_goes_on_as_before():
    torch.manual_seed(0)
    engine, optimizer = ps.initialize(lambda: Asks("integers"), CONFIG)
    x, positions = torch.randn(4, 8), torch.arange(4)
    before, random = engine.state_dict(), torch.get_rng_state()
    dry_run_report = engine.plan(x, positions, loss=lambda out: out.float().mean())
    assert dry_run_report.seconds >= dry_run_report.bound_s > 0
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()), "losses with dropout would be others"
    assert "where the time goes" in str(dry_run_report) and "nothing was trained" in str(dry_run_report)
    engine.backward(engine(x, positions).float().mean())
    optimizer.step()
    assert engine.stats.last.device_peak_model_bytes == dry_run_report.stats.device_peak_model_bytes
    engine.close()


def test_a_copy_without_bytes_keeps_ties_and_what_is_frozen():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    copied = copy_to_meta(model)
    assert copied["b"].weight is copied["a"].weight and copied["a"].weight.is_meta
    assert not copied["a"].bias.requires_grad and copied["b"].bias.requires_grad
    assert not model["a"].weight.is_meta


def test_memory_counts_until_the_last_tensor_over_it_is_gone():
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
