"""The engine's own promises beside the laws: stats, plan, refusals, closing, its precision."""

import json
import logging
import warnings
from functools import partial

import pytest
import rates
import torch
from torch import nn
from toys import Shape, batches, inputs, layers, mean_square, module, train

import patrickstar as ps
from patrickstar import runtime
from patrickstar._dry_run.precision_choice import warn_of_slow_precision
from patrickstar.errors import BudgetError, ModelError, TrainingError
from patrickstar.runtime import initialize_engine
from patrickstar.testing import assert_same_bits

WIDTH = 32
SGD = ps.SGD(lr=0.1)
IDS = torch.arange(6).reshape(2, 3)


words = module(  # an embedding far larger than what is looked up in it, and a small body
    lambda m, ids: mean_square(m.body(m.words(ids))),
    words=lambda: nn.Embedding(5000, WIDTH),
    body=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
)


def words_engine(device_memory: int) -> ps.Engine:
    config = ps.Config(device="cpu", chunk_size=4096, device_memory=device_memory)
    return ps.Engine(words, config, meter=ps.testing.NoMeter())


def test_an_embedding_that_has_to_move_is_looked_up_on_the_host():
    weight_bytes = 5000 * WIDTH * 2
    engine = words_engine(device_memory=weight_bytes + 8192)
    train(engine, [(IDS,)] * 1)
    assert engine.stats.last.h2d_bytes >= weight_bytes, "in the first step it comes up as a chunk"
    train(engine, [(IDS,)] * 2)
    lookup_bytes = 6 * WIDTH * 2
    body = engine.layout.param16_bytes - weight_bytes
    assert engine.stats.last.h2d_bytes <= lookup_bytes + body
    assert engine.stats.last.d2h_bytes <= lookup_bytes + body
    engine.close()


def test_the_papers_entry_point_does_the_same():
    engine, optimizer = initialize_engine(model_func=words, config=ps.Config(device="cpu"))
    assert isinstance(engine, ps.Engine)
    assert isinstance(optimizer, torch.optim.Optimizer)
    engine.close()


LISTING = """
class MyModel(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, x):
        return super().forward(x).square().mean()

model = MyModel()
optimizer = Optimizer(model)
model = angelptm.initialize(model,
    optimizer, config)
for batch in batches:
    loss = model(batch)
    model.backward(loss)
    model.step()
"""
"""Figure 6 of Angel-PTM, with a model in place of its dots."""


@pytest.mark.parametrize("chosen", [lambda model: torch.optim.AdamW(model.parameters(), lr=0.1), lambda model: SGD])
def test_the_listing_of_angel_ptm_trains(chosen):
    batches = list(torch.randn(3, 5, 4))
    names = {"nn": nn, "angelptm": runtime, "Optimizer": chosen, "batches": batches}
    torch.manual_seed(1)
    exec(LISTING, names | {"config": ps.Config(device="cpu", precision="fp32")}, found := {})
    options = SGD if chosen(nn.Linear(1, 1)) is SGD else ps.AdamW(lr=0.1)
    torch.manual_seed(1)
    expected, optimizer = ps.initialize(found["MyModel"], ps.Config(device="cpu", precision="fp32", optimizer=options))
    for batch in batches:
        expected.backward(expected(batch))
        optimizer.step()
    assert_same_bits(expected.state_dict(), found["model"].state_dict(), "parameters")
    expected.close()
    found["model"].close()


def test_meta_parameters_without_weights_are_refused_by_name():
    with torch.device("meta"):
        built = words()
    with pytest.raises(ModelError, match=r"words\.weight.*meta"):
        ps.initialize(built, ps.Config(device="cpu"))


def test_backward_wants_a_scalar_that_depends_on_a_parameter():
    engine = words_engine(device_memory=1 << 24)
    for shape in ((3,), ()):
        with pytest.raises(TrainingError, match=r"scalar loss.*requires_grad=False"):
            engine.backward(torch.zeros(shape))
    engine.close()


def test_an_operator_out_of_memory_is_explained():
    engine = words_engine(device_memory=1 << 24)

    def greedy(self, ids):
        weight = self.body[0].weight
        return torch.addmm(weight, weight.new_empty(1 << 40, 1), weight.new_empty(1, 1 << 10))

    engine.module.forward = greedy.__get__(engine.module)
    with pytest.raises(BudgetError, match=r"ran out of memory.*chunks.*budget is 16777216"):
        engine(torch.arange(6))
    engine.close()


def test_before_a_step_was_measured_parameters_fit_in_the_warm_ups_share_of_the_device():
    """If they do, none has to leave, and the host keeps no copies of those that come up."""
    config = ps.Config(device="cpu", chunk_size=4096)
    with ps.Engine(partial(layers, 64, 10), config, meter=ps.testing.NoMeter()) as whole:
        param16_bytes = whole.layout.param16_bytes
    for percent, keeps_duplicates in ((70, False), (90, True)):
        tight = config.model_copy(update={"device_memory": param16_bytes * 100 // percent})
        with ps.Engine(partial(layers, 64, 10), tight, meter=ps.testing.NoMeter()) as engine:
            assert engine.inspect().keeps_duplicates is keeps_duplicates


def test_an_engine_keeps_dtypes_that_are_mixed():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
    with ps.initialize(model, ps.Config(device="cpu")) as (engine, _):
        assert [p.dtype for p in engine.module.parameters()] == [torch.float32] * 2 + [torch.float64] * 2


def test_engine_and_reference_have_the_same_precision(monkeypatch):
    """Also if a second measurement would end otherwise."""
    answers = iter([50e9, 60e9] + [60e9, 50e9] * 10)
    monkeypatch.setattr(rates.MEASURED, lambda *_: next(answers))
    ps.testing.assert_exact(Shape(("mlp", "attention")).build, batches(2), ps.Config(device="cpu"))
    assert next(answers) == 60e9


def test_checkpoints_and_logs_name_what_was_chosen(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(rates.MEASURED, rates.fixed(fp32=2e9))
    config = ps.Config(device="cpu")
    with caplog.at_level(logging.INFO), ps.initialize(layers(8, 2), config) as (engine, _):
        assert engine.config.precision == "fp32" and "fp32 on cpu" in repr(engine)
        with engine.record(tmp_path / "log.jsonl"):
            train(engine, inputs(1, 8))
        engine.save(tmp_path / "saved")
    (record,) = (each for each in caplog.records if each.getMessage().startswith("precision: fp32, since "))
    assert record.levelno == logging.WARNING  # which Python shows without being asked
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
