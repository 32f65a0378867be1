"""Activation checkpointing with each of PyTorch's methods."""

import logging
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from sampling import nightly
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from toys import layers, mean_square, module, update

import patrickstar as ps
from patrickstar._autograd.interceptor import Interceptor
from patrickstar._params import out_of_memory

from .zoo import WIDTH, Stack, assert_blocks_exact, call_block, linear, normal, normal_batches, trains, weight


@pytest.fixture(params=[True, False], ids=["reentrant", "non-reentrant"])
def use_reentrant(request):
    return request.param


def dropouts(m, x):
    return x + F.dropout(m.down(F.dropout(F.gelu(m.up(x)), 0.3, m.training)), 0.3, m.training)


with_dropout = module(dropouts, up=lambda: nn.Linear(WIDTH, 2 * WIDTH), down=lambda: nn.Linear(2 * WIDTH, WIDTH))


def test_dropout_is_replayed(config, checkpointing):
    assert_blocks_exact(with_dropout, config, checkpointing)


# Inside an outer reentrant checkpoint the first forward runs without gradients, so PyTorch warns in the inner one.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("inner", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("outer", ["reentrant", "non-reentrant"])
def test_nested(outer, inner, config):
    def forward(m, x):
        return call_block(lambda x: call_block(m.second, call_block(m.first, x, inner), inner), x, outer)

    assert_blocks_exact(module(forward, first=with_dropout, second=with_dropout), config)


def test_checkpoint_sequential(use_reentrant, config):
    def body():
        return nn.Sequential(with_dropout(), nn.Tanh(), with_dropout(), linear(), nn.GELU(), linear())

    def forward(m, x):
        return checkpoint_sequential(m.body, 3, m.stem(x), use_reentrant=use_reentrant)

    ps.testing.assert_exact(module(forward, stem=linear, body=body), normal_batches(), config)


def test_a_plain_function_that_uses_the_weight(use_reentrant, config):
    """Recompute a function that is not a module and calls none."""

    def forward(m, x):
        def multiply(x, scale):
            return torch.tanh(x @ m.up * scale) @ m.down.t()

        return checkpoint(multiply, m.stem(x), 0.5, use_reentrant=use_reentrant)

    ps.testing.assert_exact(module(forward, stem=linear, up=weight, down=weight), normal_batches(), config)


def test_a_weight_passed_to_the_recomputed_function(use_reentrant, config):
    def forward(m, x):
        multiplied = checkpoint(lambda x, w: torch.tanh(x @ w), m.stem(x), m.up, use_reentrant=use_reentrant)
        return multiplied @ m.down

    ps.testing.assert_exact(module(forward, stem=linear, up=weight, down=weight), normal_batches(), config)


def test_the_whole_model_recomputed(config):
    """Nothing before the checkpoint requires a gradient."""
    body = {"body": lambda: nn.Sequential(linear(), nn.Tanh(), linear())}
    build = module(lambda m, x: checkpoint(m.body, x, use_reentrant=False), **body)
    ps.testing.assert_exact(build, normal_batches(), config)


@pytest.mark.parametrize("early_stop", [True, False])
@trains(lambda: Stack([with_dropout(), with_dropout()], "non-reentrant"))
def test_recompute_stopped_early_or_not(trainer, optimizer, early_stop):
    for (x,) in normal_batches():
        with set_checkpoint_early_stop(early_stop):
            loss = update(trainer, mean_square(trainer(x)))
        yield loss


def test_selective(config):
    """Save matrix products and recompute everything else."""

    def keep_products(ctx, op, *args, **kwargs):
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    build = module(lambda m, x: checkpoint(m.inner, x, use_reentrant=False, context_fn=contexts), inner=with_dropout)
    assert_blocks_exact(build, config)


def test_keywords_and_structures_through_a_checkpoint(config):
    inner = module(
        lambda m, states, *, gates: {"states": m.first(states), "gates": [m.second(gates)]}, first=linear, second=linear
    )

    def forward(m, x):
        output = checkpoint(m.inner, x, gates=torch.sigmoid(x), use_reentrant=False)
        return output["states"] * output["gates"][0]

    assert_blocks_exact(module(forward, inner=inner), config)


def test_frozen_block_recomputed(config, checkpointing):
    def build():
        return Stack([with_dropout(), with_dropout().requires_grad_(False), with_dropout()], checkpointing)

    ps.testing.assert_exact(build, normal_batches(), config)


@trains(lambda: Stack([with_dropout(), with_dropout()]))
def test_checkpointing_switched_between_steps(trainer, optimizer):
    ways = ["off", "non-reentrant", "reentrant", "off"]
    for (x,), trainer.module.checkpointing in zip(normal_batches(4), ways, strict=True):
        yield update(trainer, mean_square(trainer(x)))


class OutOfMemoryAt(TorchDispatchMode):
    """Lets one matrix product run out of memory, after autograd has saved its inputs."""

    def __init__(self, product):
        self.left = product

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.default:
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("out of memory, says a test")
        return func(*args, **(kwargs or {}))


SMALL = ps.Config(device="cpu", precision="fp32", device_memory="1MiB")


def alike():
    """Build layers whose saved tensors are all alike, for inputs of as many rows."""
    return Stack([layers(WIDTH, 4)], "non-reentrant")


@pytest.mark.parametrize("product", [1, 3, 4, 5, 6, 7], ids="product-{}".format)
@pytest.mark.parametrize("early_stop", [True, False], ids=["stopped-early", "whole"])
@trains(alike, SMALL)
def test_an_operator_tried_again_is_saved_once(trainer, optimizer, product, early_stop):
    """In the forward, or in the recomputation from the fifth product on: tensors would be taken for those before."""
    for step in range(2):
        fails = OutOfMemoryAt(product) if isinstance(trainer, ps.Engine) else nullcontext()
        with set_checkpoint_early_stop(early_stop), fails:
            loss = mean_square(trainer(normal(WIDTH, WIDTH, seed=step)))
            trainer.backward(loss)
        assert isinstance(fails, nullcontext) or fails.left <= 0
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("unknown", ["variables", "lists"])
def test_an_operator_is_not_tried_again_under_a_checkpoint_of_an_unknown_version(monkeypatch, unknown):
    if unknown == "lists":
        monkeypatch.setattr(out_of_memory, "LISTS_OF_BLOCK", ("holders",))
    else:
        unwrapped = SimpleNamespace(unwrap=lambda hook: lambda value: hook(value))
        monkeypatch.setattr(out_of_memory, "inspect", unwrapped)
    engine = ps.Engine(alike, SMALL)
    with OutOfMemoryAt(3), pytest.raises(ps.errors.BudgetError, match="ran out of memory"):
        engine(normal(WIDTH, WIDTH))
    engine.close()


@pytest.mark.parametrize("updates", [False, True], ids=["in the step", "in backward"])
def test_a_window_that_was_suspended_leaves_no_moments_in_the_trace(one_thread, monkeypatch, caplog, updates):
    """And its parameters, which it will hold again, are not updated meanwhile."""
    caplog.set_level(logging.INFO, logger="patrickstar")
    suspended, open_window = [], Interceptor._open
    monkeypatch.setattr(Interceptor, "_open", lambda *args: suspended.extend(args[2:]) or open_window(*args))
    build = module(
        lambda m, x: checkpoint_sequential(m.layers, 3, x, use_reentrant=False),
        layers=lambda: layers(32, 6, nn.GELU),
    )
    for device_memory in range(36_300, 37_300, 100 if nightly() else 250):  # in some, later steps have room for both
        config = ps.Config(device="cpu", device_memory=device_memory, chunk_size=4400, precision="fp32")
        with ps.Engine(build, config) as engine:
            for _ in range(4):
                update(engine, mean_square(engine(torch.ones(16, 32))), update=updates)
    assert suspended
    assert not [record.getMessage() for record in caplog.records if "trace dropped" in record.getMessage()]
