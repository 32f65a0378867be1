"""Choice of recomputed layers and of offload by dry runs: `Config(activation_checkpointing="auto")`."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fixed_machine import same_machine  # noqa: F401
from torch import nn
from toys import mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar._autograd.recomputed_layers import Activations, find_layers
from patrickstar._dry_run.op_benchmark import OpBenchmark
from patrickstar._engine import activation_choice
from patrickstar._engine.activation_choice import CHOICES, WITHOUT_LAYERS, _fastest
from patrickstar._layout.byte_size import parse_size
from patrickstar.errors import BudgetError, ConfigError

from .test_language_models import batches
from .test_recomputed_layers import build, with_share
from .zoo import small_chunks


@pytest.fixture(autouse=True)
def untimed_operators(monkeypatch):
    """Let the time of an operator follow from its bytes, and do not count that of Python."""
    monkeypatch.setattr("patrickstar._dry_run.measured_machine.OpBenchmark", partial(OpBenchmark, timed=False))
    monkeypatch.setattr("patrickstar._dry_run.measured_machine.measure_host", lambda costs: None)


@dataclass
class Report:
    seconds: float
    compute_s: float


def choose(monkeypatch, reports, choices=CHOICES):
    """Return what is chosen and what is tried, if dry runs have these seconds and computation; others do not fit."""
    tried = []

    def dry_run(engine, step, options, measured):
        tried.append(Activations(**options))
        if tried[-1] not in reports:
            raise BudgetError("too small")
        return Report(*reports[tried[-1]])

    monkeypatch.setattr(activation_choice, "dry_run_engine", dry_run)
    core = SimpleNamespace(config=ps.Config(device="cpu"), device=torch.device("cpu"))
    return _fastest(None, core, choices, (), {})[0], tried


def test_the_fastest_that_fits_is_chosen(monkeypatch):
    stored, products, half, all_layers = (Activations(share, 0.0) for share in (0.0, "products", 0.5, 1.0))
    assert choose(monkeypatch, {stored: (3.0, 1.0), products: (2.0, 1.1), half: (1.5, 1.2)})[0] == half
    assert choose(monkeypatch, {stored: (3.0, 1.0), all_layers: (3.5, 1.3)})[0] == stored
    chosen, tried = choose(monkeypatch, {all_layers: (3.5, 1.3)})
    assert chosen == all_layers and tried == list(CHOICES)


def test_what_computes_longer_than_the_fastest_takes_is_not_tried(monkeypatch):
    stored, products = Activations(0.0, 0.0), Activations("products", 0.0)
    assert choose(monkeypatch, {stored: (1.0, 1.0)}) == (stored, [stored])
    chosen, tried = choose(monkeypatch, {stored: (1.1, 1.0), products: (1.3, 1.2)})
    assert chosen == stored and tried == list(CHOICES[: CHOICES.index(products) + 1])


def test_if_nothing_fits_the_step_finds_out_with_the_least_memory(monkeypatch):
    assert choose(monkeypatch, {}) == (CHOICES[-1], list(CHOICES))
    assert choose(monkeypatch, {}, WITHOUT_LAYERS)[0] == Activations(None, 1.0)


def within(device_memory, share="auto", **options):
    update = {"device_memory": parse_size(device_memory), "activation_checkpointing": share}
    return small_chunks("fp32", **options).model_copy(update=update)


def run(name, share, device_memory, steps=4, check=None):
    """Train; return losses, parameters and the engine's configuration."""
    config = within(device_memory, chunk_bytes=4096)
    torch.manual_seed(0)
    losses = []
    with ps.Engine(lambda: build(name, use_cache=True), with_share(config, share)) as engine:
        torch.manual_seed(1)
        for batch in batches((8,) * steps):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
        if check is not None:
            check(engine)
        return losses, engine.state_dict(), engine.config


def same_bits(one, other):
    return one[0] == other[0] and all(value.equal(other[1][name]) for name, value in one[1].items())


@pytest.mark.parametrize("name", ["dropout", "llama"])
def test_bits_do_not_depend_on_what_was_chosen(name, monkeypatch):
    """Also if everything is stored, for which models of transformers use a cache, which rounds otherwise."""
    recomputed = run(name, 1.0, "8MiB")
    for choice in (CHOICES[0], CHOICES[1], Activations("products", 0.4), Activations(0.5, 0.0), CHOICES[-1]):
        monkeypatch.setattr(activation_choice, "_fastest", lambda *args, choice=choice: (choice, "a test"))
        chosen = run(name, "auto", "8MiB")
        config = chosen[2]
        assert (config.activation_checkpointing, config.activation_offload) == choice
        assert same_bits(chosen, recomputed), choice


def test_a_step_is_chosen_for_and_planned(caplog):
    """In ample memory all is stored; in little memory the choice fits, and `engine.plan` knows it."""
    caplog.set_level("INFO", "patrickstar")
    needed = []

    def measure(engine):
        needed.append(engine.stats.last.device_peak_non_model_bytes)

    def compare(engine):
        measure(engine)
        predicted = engine.plan(**batches((8,))[0]).stats.device_peak_non_model_bytes
        assert abs(predicted - needed[-1]) <= 0.1 * needed[-1]

    config = run("llama", "auto", "64MiB", check=measure)[2]
    assert (config.activation_checkpointing, config.activation_offload) == CHOICES[0]
    assert "activations: all stored, 0% offloaded, the fastest of" in caplog.text
    run("llama", 1.0, "64MiB", check=measure)
    stored, recomputed = needed
    assert recomputed < 0.6 * stored, "the test needs a budget between both"
    with pytest.raises(BudgetError):
        run("llama", 0.0, stored - 4096)
    config = run("llama", "auto", stored - 4096, check=compare)[2]
    assert Activations(config.activation_checkpointing, config.activation_offload) != CHOICES[0]


def test_what_never_fits_is_refused_by_the_step():
    with pytest.raises(BudgetError, match="the budget of 16384 bytes holds"):
        run("llama", "auto", "16KiB")


def test_a_model_of_another_library_offloads_or_stores():
    config = within("1MiB")
    with ps.Engine(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), config) as engine:
        engine.backward(mean_square(engine(torch.randn(4, 16))))
        engine.optimizer.step()
        assert engine.config.activation_checkpointing is None
        with torch.no_grad():
            engine(torch.randn(2, 16))


class Reading(nn.Module):
    """Its forward depends on values, which a dry run does not have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if x.sum().item() > -1e9 else x


def test_code_that_cannot_be_dry_run_is_warned_of_and_trains():
    config = within("1MiB")
    with ps.Engine(Reading, config) as engine:
        with pytest.warns(UserWarning, match="has become all stored, 100% offloaded, .* can't run the model's code"):
            loss = mean_square(engine(torch.randn(4, 4)))
        engine.backward(loss)
        engine.optimizer.step()


def test_evaluation_before_training_chooses_nothing():
    config = within("8MiB")
    with ps.Engine(lambda: build("llama"), config) as engine:
        with torch.no_grad():
            engine(**batches((8,))[0])
        assert engine.config.activation_checkpointing == "auto"
        assert all(layer.gradient_checkpointing for layer in find_layers(engine.module))
        engine(**batches((8,))[0]).loss.backward()
        assert engine.config.activation_checkpointing != "auto"


def test_a_sample_is_checked_with_the_least_that_may_be_chosen():
    config = within("8MiB")
    batch = batches((8,))[0]
    with ps.initialize(lambda: build("llama"), config, sample=batch) as (engine, _):
        assert engine.config.activation_checkpointing == "auto"
    with pytest.raises(BudgetError):
        ps.initialize(lambda: build("llama"), config.model_copy(update={"device_memory": 1 << 14}), sample=batch)


def test_exact_against_plain_pytorch():
    config = with_share(small_chunks("fp32", chunk_bytes=2048), "auto")
    testing.assert_exact(lambda: build("llama"), batches(), config, accumulation=2)


def test_both_shares_are_chosen_together():
    with pytest.raises(ConfigError, match="'auto' chooses the share of activation_offload, too: leave that"):
        ps.Config(activation_checkpointing="auto", activation_offload=0.5)
