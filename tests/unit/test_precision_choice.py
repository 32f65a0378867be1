"""The precision "auto": which one it becomes on which machine, who is told, and what keeps it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import rates
import torch
from torch import nn
from toys import layers

import patrickstar as ps
from patrickstar._dry_run.precision_choice import linear_widths, settle_precision
from patrickstar._dry_run.product_rates import TYPICAL_WIDTH
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar.errors import ConfigError

CPU = torch.device("cpu")


def choose(config=None, model=None, device=CPU):
    """Return the settled configuration and the text about the choice, if there was one."""
    said = []
    settled = settle_precision(config or ps.Config(), model or layers(8, 1), device, say=said.append)
    return settled, "".join(map(str, said))


@pytest.mark.parametrize(
    ("bf16", "fp32", "precision"),
    [
        (800e9, 100e9, "bf16"),
        (0.7e9, 60e9, "fp32"),
        (50e9, 50e9, "bf16"),
        (50e9, 57e9, "bf16"),  # a tie: fp32 has to be faster by more than 16 / 14, the ratio of bytes
        (50e9, 58e9, "fp32"),
    ],
)
def test_a_cpu_trains_in_what_is_faster(monkeypatch, bf16, fp32, precision):
    monkeypatch.setattr(rates.MEASURED, rates.fixed(bf16=bf16, fp32=fp32))
    settled, _ = choose(model=layers(768, 1))
    assert settled.precision == precision
    assert settled.compute_dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    assert "precision" not in settled.model_fields_set  # nobody asked for it


def test_one_line_says_what_was_chosen_and_why(monkeypatch):
    monkeypatch.setattr(rates.MEASURED, rates.fixed(bf16=0.7e9, fp32=58.4e9))
    _, said = choose(model=nn.Linear(768, 3072))
    assert said == (
        "precision: fp32, since a core computes the products of a layer of 768 to 3,072 at 0.70 GFLOPS in bf16 and at "
        "58 GFLOPS in fp32"
    )


def test_what_is_named_is_taken_without_measuring(monkeypatch):
    monkeypatch.setattr(rates.MEASURED, rates.never)
    for precision in ("bf16", "fp16", "fp32"):
        settled, said = choose(ps.Config(precision=precision))
        assert (settled.precision, said) == (precision, "")


@pytest.mark.parametrize(("has_bf16", "precision"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_trains_in_bf16_if_it_has_it(monkeypatch, has_bf16, precision):
    monkeypatch.setattr(rates.MEASURED, rates.never)
    gpu = SimpleNamespace(has_bf16=has_bf16, name="Tesla V100")
    monkeypatch.setattr("patrickstar._tiers.hardware.Hardware.new_accelerator", lambda device: gpu)
    settled, said = choose(device=torch.device("cuda", 0))
    assert settled.precision == precision and said.startswith(f"precision: {precision}, since Tesla V100 has ")
    lock_free = ps.LockFree(gradient_dtype="16-bit")  # which excludes fp16
    with nullcontext() if has_bf16 else pytest.raises(ConfigError, match="without the loss scale"):
        choose(ps.Config(update=lock_free), device=torch.device("cuda", 0))


def test_a_simulated_machine_trains_in_what_its_spec_has():
    assert find_machine("8xV100-32GB").precision == "fp16"
    assert find_machine("8xA100-40GB").precision == "bf16"


def test_the_widths_are_those_of_most_weights():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(5000, 16)
            self.wide, self.mlp = nn.Linear(16, 64), nn.ModuleList(nn.Linear(64, 16) for _ in range(3))
            self.image = nn.Conv2d(3, 4, 2)

    assert linear_widths(Model()) == (16, 64)
    assert linear_widths(nn.Conv2d(3, 4, 2)) == (4, 12)
    assert linear_widths(nn.LayerNorm(8)) == (TYPICAL_WIDTH, TYPICAL_WIDTH)


@pytest.mark.parametrize(("build", "widths"), [(lambda: nn.Linear(48, 32), (32, 48)), (lambda: 1 / 0, None)])
def test_a_function_is_described_without_memory(monkeypatch, build, widths):
    measured = []
    monkeypatch.setattr(rates.MEASURED, lambda precision, *sizes: measured.append(sizes) or 1e9)
    before = torch.get_rng_state()
    choose(model=build)
    assert set(measured) == {widths or (TYPICAL_WIDTH, TYPICAL_WIDTH)}
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_mixes_dtypes_keeps_them(monkeypatch):
    monkeypatch.setattr(rates.MEASURED, rates.never)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
    settled, said = choose(model=model)
    assert settled.precision == "bf16" and "mixes dtypes and keeps them" in said


def test_nothing_asks_for_the_dtype_before_the_choice():
    with pytest.raises(ConfigError, match="chosen when an engine is created"):
        _ = ps.Config().compute_dtype
