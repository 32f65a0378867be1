"""Lookups of an embedding whose weight other operators read, too, run on the host where that moves fewer bytes."""

from functools import partial

import pytest
import torch
from seeded import compared, engine_of, run_step
from simulated_machines import DESKTOP
from torch.utils.checkpoint import checkpoint
from toys import layers, mean_square, module, train

import patrickstar as ps
from patrickstar._dry_run.simulation import simulate

from .models import config

WORDS, WIDTH = 3000, 16


def words(count, rows=2, length=3):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(0, WORDS, (rows, length), generator=generator),) for _ in range(count)]


def language_model(m, ids):
    return m.head(m.layers(m.words(ids)))


def encoder_and_decoder(m, ids):
    """Look up twice, and read the weight in two products."""
    hidden = m.layers(m.words(ids)) + m.layers(m.words(ids.flip(1)))
    return m.head(hidden) + m.head(hidden.tanh())


def tied(forward, padding_idx=None, words=WORDS, width=WIDTH, depth=12):
    build = module(
        forward,
        words=lambda: torch.nn.Embedding(words, width, padding_idx),
        layers=lambda: layers(width, depth, torch.nn.Tanh),
        head=lambda: torch.nn.Linear(width, words, bias=False),
    )

    def build_tied():
        model = build()
        model.head.weight = model.words.weight
        return model

    return build_tied


def lookup_tier(engine):
    (found,) = [each.lookup_tier for each in engine.inspect().parameters if each.lookup_tier is not None]
    return found


@pytest.mark.parametrize("forward", [language_model, encoder_and_decoder])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bits_are_those_of_plain_pytorch_if_everything_is_evicted(forward, precision):
    def script(trainer):
        results = train(trainer, words(6), max_norm=1.0)
        with torch.no_grad():
            results.append(trainer(*words(1)[0]).clone())
        return results + train(trainer, words(4), accumulation=2)

    with compared(tied(forward, 7), config(precision, 4096), script, evict_everything=True) as engine:
        assert lookup_tier(engine) == "host"


def test_a_step_fetches_the_weight_once():
    """Beside the weight the budget holds few layers: it leaves between the lookup and the head, and comes twice."""
    weight_bytes = 4 * WORDS * WIDTH
    options = config("fp32", "auto", device_memory=weight_bytes + 12 * 1024)
    with compared(tied(language_model), options, lambda trainer: train(trainer, words(8))) as engine:
        on_host, moved = lookup_tier(engine), engine.stats.last.h2d_bytes
    assert on_host == "host"
    assert moved < 2 * weight_bytes


def test_a_weight_that_fits_is_looked_up_on_the_device():
    with compared(tied(language_model), config("fp32", 4096), lambda trainer: train(trainer, words(5))) as engine:
        assert lookup_tier(engine) == "device"


def test_a_weight_that_is_updated_on_the_device_is_looked_up_there():
    """Its states are on the host with 2.5 GB, on the device with 3.3 GB; with 4.5 GB all are."""
    found = []

    def step(engine):
        run_step(engine, (torch.zeros(2, 3, dtype=torch.int64, device="meta"),))
        found[-1:] = [(lookup_tier(engine), engine.stats.last.h2d_bytes)]

    for megabytes in (2500, 3300, 4500):
        found.append(())
        options = config("bf16", "auto", device_memory=megabytes * 10**6, host_memory=10**10)
        simulate(ps.Engine, tied(language_model, None, 128_000, 1024, 100), options, step, DESKTOP)
    (first, most), (second, some), (third, none) = found
    assert (first, second, third) == ("host", "device", "device")
    assert none == 0 < some < most


def test_hooks_and_graphs_of_gradients_alone():
    """A user's hook sees the sum of all gradients, and `torch.autograd.grad` returns it."""

    def script(trainer):
        results = train(trainer, words(4))
        weight = dict(trainer.module.named_parameters())["words.weight"]
        results.append(torch.autograd.grad(mean_square(trainer(*words(1)[0])), weight)[0].clone())
        handle = weight.register_hook(lambda grad: grad * 2)
        results += train(trainer, words(2))
        handle.remove()
        return results + train(trainer, words(2))

    build = partial(tied(encoder_and_decoder))
    with compared(build, config("fp32", 4096), script, evict_everything=True) as engine:
        assert lookup_tier(engine) == "host"


@pytest.mark.parametrize("checkpoints", [False, True])
def test_late_updates_have_the_same_bits_wherever_lookups_run(checkpoints, tmp_path):
    """Delayed updates, from disk too, and lookups that backward repeats."""

    def forward(m, ids):
        hidden = checkpoint(m.words, ids, use_reentrant=False) if checkpoints else m.words(ids)
        return m.head(m.layers(hidden))

    found = []
    for tiers in ({}, {"evict_everything": True}, {"evict_everything": True, "disk": str(tmp_path)}):
        hooks = {"evict_everything": tiers.pop("evict_everything", False)}
        memory = {"host_memory": "1MiB"} if tiers else {}
        options = config("bf16", 4096, update=ps.Delayed(), **tiers, **memory)
        with engine_of(tied(forward), options, **hooks) as engine:
            results = train(engine, words(8))
            assert lookup_tier(engine) == ("host" if hooks["evict_everything"] else "device")
            engine.optimizer.flush()
            found.append([*results, *engine.state_dict().values()])
    for other in found[1:]:
        ps.testing.assert_same_bits(found[0], other, "losses and parameters")
