"""`patrickstar doctor`: what it says with the C++ kernel, and what it advises without."""

import pytest
from command_line import done

from patrickstar._cli import doctor
from patrickstar._kernels.cpp_backend import CppBackend, Unavailable
from patrickstar._kernels.eager_backend import EagerBackend


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(
        doctor, "examine", lambda examine=doctor.examine, **options: examine(trial_numel=100_000, **options)
    )


def report():
    return done("doctor").stdout


def test_every_finding_has_its_line():
    names = [line[:16].strip() for line in report().splitlines()]
    memory, rates = ["memory", "memory speed"], ["update speed", "products"]
    for name in ("patrickstar", "processor", "C++ kernel", "Triton kernel", *memory, *rates):
        assert names.count(name) == 1


@pytest.mark.skipif(CppBackend.find() is None, reason="installed without a C++ compiler")
def test_the_kernel_names_its_instruction_sets():
    text = report()
    assert all(variant in text for variant in CppBackend.find().variants())
    assert "->" not in text.split("Triton kernel")[0]


@pytest.mark.parametrize(
    ("rates", "advice"),
    [
        ((100e9, 400e9, 8e9), "train in bf16 on this CPU, as precision='auto' does for a model of these widths; fp16"),
        (
            (58e9, 0.7e9, 0.9e9),
            "train in fp32 on this CPU, as precision='auto' does for a model of these widths; bf16 and",
        ),
    ],
)
def test_products_are_compared_by_precision(monkeypatch, rates, advice):
    measured = dict(zip(("fp32", "bf16", "fp16"), rates, strict=True))
    monkeypatch.setattr(doctor, "product_rate", lambda precision, *widths: measured[precision])
    finding = doctor._products()
    assert f"fp32 at {rates[0] / 1e9:.0f} GFLOPS, bf16 at " in finding.text
    assert advice in finding.advice


def refuse(why):
    def load(*_):
        raise Unavailable(why)

    return load


def test_without_the_kernel_it_says_why_and_what_to_do(monkeypatch):
    monkeypatch.setattr(doctor.CppBackend, "load", refuse("it was not built: install it again"))
    text = report()
    assert "not available. Updates on the host use PyTorch's operators" in text
    assert "-> it was not built: install it again" in text
    assert f"by {EagerBackend.name}" in text


def test_a_gpu_where_triton_does_not_work_is_told(monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor.TritonBackend, "load", refuse("triton is not installed: pip install triton"))
    assert "pip install triton" in report()
