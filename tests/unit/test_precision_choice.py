"""The precision "auto": which one it becomes on which machine, who is told, and what keeps it."""

import json
import logging
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import rates
import torch
from torch import nn
from toys import batches, inputs, layers, train

import patrickstar as ps
from patrickstar import testing
from patrickstar._dry_run.precision_choice import linear_widths, settle_precision, warn_of_slow_precision
from patrickstar._dry_run.product_rates import LIMIT_S, TYPICAL_WIDTH, product_rate
from patrickstar._memory.accelerator import Accelerator
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar.errors import ConfigError

CPU = torch.device("cpu")


def never(*_):
    raise AssertionError("measured")


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


def test_one_line_says_what_was_chosen_and_why(monkeypatch, caplog):
    monkeypatch.setattr(rates.MEASURED, rates.fixed(bf16=0.7e9, fp32=58.4e9))
    _, said = choose(model=nn.Linear(768, 3072))
    assert said == (
        "precision: fp32, since a core computes the products of a layer of 768 to 3,072 at 0.70 GFLOPS in bf16 and at "
        "58 GFLOPS in fp32"
    )
    with caplog.at_level(logging.INFO):
        ps.initialize(nn.Linear(768, 3072), ps.Config(device="cpu"))[0].close()
    (record,) = (each for each in caplog.records if each.getMessage() == said)
    assert record.levelno == logging.WARNING  # which Python shows without being asked


def test_what_is_named_is_taken_without_measuring(monkeypatch):
    monkeypatch.setattr(rates.MEASURED, never)
    for precision in ("bf16", "fp16", "fp32"):
        settled, said = choose(ps.Config(precision=precision))
        assert (settled.precision, said) == (precision, "")


@pytest.mark.parametrize(("has_bf16", "precision"), [(True, "bf16"), (False, "fp16")])
def test_a_gpu_trains_in_bf16_if_it_has_it(monkeypatch, has_bf16, precision):
    monkeypatch.setattr(rates.MEASURED, never)
    gpu = SimpleNamespace(has_bf16=has_bf16, name="Tesla V100")
    monkeypatch.setattr("patrickstar._memory.hardware.Hardware.new_accelerator", lambda device: gpu)
    settled, said = choose(device=torch.device("cuda", 0))
    assert settled.precision == precision and said.startswith(f"precision: {precision}, since Tesla V100 has ")
    lock_free = ps.LockFree(gradient_dtype="16-bit")  # which excludes fp16
    with nullcontext() if has_bf16 else pytest.raises(ConfigError, match="without the loss scale"):
        choose(ps.Config(update=lock_free), device=torch.device("cuda", 0))


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
    monkeypatch.setattr(rates.MEASURED, never)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
    settled, said = choose(model=model)
    assert settled.precision == "bf16" and "mixes dtypes and keeps them" in said
    with ps.initialize(model, ps.Config(device="cpu")) as (engine, _):
        assert [p.dtype for p in engine.module.parameters()] == [torch.float32] * 2 + [torch.float64] * 2


def test_nothing_asks_for_the_dtype_before_the_choice():
    with pytest.raises(ConfigError, match="chosen when an engine is created"):
        _ = ps.Config().compute_dtype


def test_engine_and_reference_have_the_same_precision(monkeypatch):
    """Also if a second measurement would end otherwise."""
    answers = iter([50e9, 60e9] + [60e9, 50e9] * 10)
    monkeypatch.setattr(rates.MEASURED, lambda *_: next(answers))
    testing.assert_exact(lambda: layers(8, 2), inputs(2, 8), ps.Config(device="cpu"))
    assert next(answers) == 60e9


def test_checkpoints_and_logs_name_what_was_chosen(monkeypatch, tmp_path):
    monkeypatch.setattr(rates.MEASURED, rates.fixed(fp32=2e9))
    config = ps.Config(device="cpu")
    with ps.initialize(layers(8, 2), config) as (engine, _):
        assert engine.config.precision == "fp32" and "fp32 on cpu" in repr(engine)
        with engine.record(tmp_path / "log.jsonl"):
            train(engine, inputs(1, 8))
        engine.save(tmp_path / "saved")
    (run,) = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines() if '"run"' in line]
    assert run["precision"] == "fp32"
    monkeypatch.setattr(rates.MEASURED, rates.fixed())
    with (
        ps.initialize(layers(8, 2), config) as (engine, _),
        pytest.warns(UserWarning, match="trained in fp32, and precision='auto' is bf16 here") as told,
    ):
        engine.load(tmp_path / "saved")
    assert told[0].filename == __file__
    asked = ps.Config(device="cpu", precision="bf16")  # whoever asks for another one gets it without a word
    with ps.initialize(layers(8, 2), asked) as (engine, _):
        engine.load(tmp_path / "saved")


def test_a_slow_precision_draws_one_warning_with_both_rates(monkeypatch):
    monkeypatch.setattr(rates.MEASURED, rates.fixed(bf16=0.7e9, fp32=58e9, fp16=6e9))
    with pytest.warns(UserWarning) as told:
        ps.initialize(lambda: layers(8, 2), ps.Config(device="cpu", precision="bf16"), sample=inputs(1, 8)[0])[
            0
        ].close()
    (warning,) = told
    assert "precision='bf16' is slow here" in str(warning.message)
    assert "at 0.70 GFLOPS in bf16 and at 58 GFLOPS in fp32, 83 times faster" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for precision in ("auto", "fp32", "fp16"):  # fp16 is 9.7 times slower
            ps.initialize(layers(8, 2), ps.Config(device="cpu", precision=precision))[0].close()
        warn_of_slow_precision(ps.Config(precision="bf16"), layers(8, 2), torch.device("cuda"))


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
    from torch.utils._python_dispatch import TorchDispatchMode

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
    from patrickstar._dry_run import product_rates

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


def test_batches_of_a_language_model_train_in_what_is_chosen(monkeypatch):
    from toys import Shape

    monkeypatch.setattr(rates.MEASURED, rates.fixed(fp32=2e9))
    testing.assert_exact(Shape(("mlp", "attention")).build, batches(2), ps.Config(device="cpu"))
