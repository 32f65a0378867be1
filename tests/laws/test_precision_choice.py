"""The precision "auto" of an engine: told once, kept in checkpoints and logs, the same in the reference."""

import json
import logging
import warnings

import pytest
import rates
import torch
from torch import nn
from toys import Shape, batches, inputs, layers, train

import patrickstar as ps
from patrickstar import testing
from patrickstar._dry_run.precision_choice import warn_of_slow_precision


def test_what_was_chosen_is_a_warning_of_the_log(monkeypatch, caplog):
    monkeypatch.setattr(rates.MEASURED, rates.fixed(bf16=0.7e9, fp32=58.4e9))
    with caplog.at_level(logging.INFO):
        ps.initialize(nn.Linear(768, 3072), ps.Config(device="cpu"))[0].close()
    (record,) = (each for each in caplog.records if each.getMessage().startswith("precision: fp32, since "))
    assert record.levelno == logging.WARNING  # which Python shows without being asked


def test_an_engine_keeps_dtypes_that_are_mixed():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
    with ps.initialize(model, ps.Config(device="cpu")) as (engine, _):
        assert [p.dtype for p in engine.module.parameters()] == [torch.float32] * 2 + [torch.float64] * 2


def test_engine_and_reference_have_the_same_precision(monkeypatch):
    """Also if a second measurement would end otherwise."""
    answers = iter([50e9, 60e9] + [60e9, 50e9] * 10)
    monkeypatch.setattr(rates.MEASURED, lambda *_: next(answers))
    testing.assert_exact(Shape(("mlp", "attention")).build, batches(2), ps.Config(device="cpu"))
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
        pytest.warns(UserWarning, match="trained in fp32, and precision='auto' is bf16 here") as warned,
    ):
        engine.load(tmp_path / "saved")
    assert warned[0].filename == __file__
    asked = ps.Config(device="cpu", precision="bf16")  # whoever asks for another one gets it without a word
    with ps.initialize(layers(8, 2), asked) as (engine, _):
        engine.load(tmp_path / "saved")


def test_a_slow_precision_draws_one_warning_with_both_rates(monkeypatch):
    monkeypatch.setattr(rates.MEASURED, rates.fixed(bf16=0.7e9, fp32=58e9, fp16=6e9))
    with pytest.warns(UserWarning) as warned:
        slow = ps.Config(device="cpu", precision="bf16")
        ps.initialize(lambda: layers(8, 2), slow, sample=inputs(1, 8)[0])[0].close()
    (warning,) = warned
    assert "precision='bf16' is slow here" in str(warning.message)
    assert "at 0.70 GFLOPS in bf16 and at 58 GFLOPS in fp32, 83 times faster" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for precision in ("auto", "fp32", "fp16"):  # fp16 is 9.7 times slower
            ps.initialize(layers(8, 2), ps.Config(device="cpu", precision=precision))[0].close()
        warn_of_slow_precision(ps.Config(precision="bf16"), layers(8, 2), torch.device("cuda"))
