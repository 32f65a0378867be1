"""Activation checkpointing with each of PyTorch's methods."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from toys import mean_square

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine

from .zoo import WIDTH, Stack, assert_blocks_exact, call_block, linear, normal_batches, update, weight


@pytest.fixture(params=[True, False], ids=["reentrant", "non-reentrant"])
def use_reentrant(request):
    return request.param


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.dropout(F.gelu(self.up(x)), 0.3, self.training)), 0.3, self.training)


def test_dropout_is_replayed(config, checkpointing):
    assert_blocks_exact(WithDropout, config, checkpointing)


class Nested(nn.Module):
    def __init__(self, outer, inner):
        super().__init__()
        self.first, self.second = WithDropout(), WithDropout()
        self.outer, self.inner = outer, inner

    def forward(self, x):
        return call_block(self.body, x, self.outer)

    def body(self, x):
        return call_block(self.second, call_block(self.first, x, self.inner), self.inner)


# Inside an outer reentrant checkpoint the first forward runs without gradients, so PyTorch warns in the inner one.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("inner", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("outer", ["reentrant", "non-reentrant"])
def test_nested(outer, inner, config):
    assert_blocks_exact(lambda: Nested(outer, inner), config)


class Sequence(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.stem, self.use_reentrant = linear(), use_reentrant
        self.layers = nn.Sequential(WithDropout(), nn.Tanh(), WithDropout(), linear(), nn.GELU(), linear())

    def forward(self, x):
        return checkpoint_sequential(self.layers, 3, self.stem(x), use_reentrant=self.use_reentrant)


def test_checkpoint_sequential(use_reentrant, config):
    testing.assert_exact(lambda: Sequence(use_reentrant), normal_batches(), config)


class PlainFunction(nn.Module):
    """Recomputes a function that is not a module and calls none."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.stem, self.up, self.down, self.use_reentrant = linear(), weight(), weight(), use_reentrant

    def forward(self, x):
        def multiply(x, scale):
            return torch.tanh(x @ self.up * scale) @ self.down.t()

        return checkpoint(multiply, self.stem(x), 0.5, use_reentrant=self.use_reentrant)


def test_a_plain_function_that_uses_the_weight(use_reentrant, config):
    testing.assert_exact(lambda: PlainFunction(use_reentrant), normal_batches(), config)


class WeightAsArgument(PlainFunction):
    def forward(self, x):
        def multiply(x, matrix):
            return torch.tanh(x @ matrix)

        return checkpoint(multiply, self.stem(x), self.up, use_reentrant=self.use_reentrant) @ self.down


def test_a_weight_passed_to_the_recomputed_function(use_reentrant, config):
    testing.assert_exact(lambda: WeightAsArgument(use_reentrant), normal_batches(), config)


class Outermost(nn.Module):
    """Recomputes the whole model; nothing before the checkpoint requires a gradient."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(linear(), nn.Tanh(), linear())

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


def test_the_whole_model_recomputed(config):
    testing.assert_exact(Outermost, normal_batches(), config)


@pytest.mark.parametrize("early_stop", [True, False])
def test_recompute_stopped_early_or_not(early_stop, config):
    def script(trainer, optimizer):
        losses = []
        for (x,) in normal_batches():
            with set_checkpoint_early_stop(early_stop):
                losses.append(update(trainer, optimizer, mean_square(trainer(x))))
        return losses

    testing.compare(lambda: Stack([WithDropout(), WithDropout()], "non-reentrant"), config, script)


class Selective(nn.Module):
    """Saves matrix products and recomputes everything else."""

    def __init__(self):
        super().__init__()
        self.inner = WithDropout()

    def forward(self, x):
        def keep_products(ctx, op, *args, **kwargs):
            products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE

        def contexts():
            return create_selective_checkpoint_contexts(keep_products)

        return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)


def test_selective(config):
    assert_blocks_exact(Selective, config)


class KeywordsAndStructures(nn.Module):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, states, *, gates):
            return {"states": self.first(states), "gates": [self.second(gates)]}

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        output = checkpoint(self.inner, x, gates=torch.sigmoid(x), use_reentrant=False)
        return output["states"] * output["gates"][0]


def test_keywords_and_structures_through_a_checkpoint(config):
    assert_blocks_exact(KeywordsAndStructures, config)


def test_frozen_block_recomputed(config, checkpointing):
    def build():
        model = Stack([WithDropout(), WithDropout().requires_grad_(False), WithDropout()], checkpointing)
        model.stem.requires_grad_(True)
        return model

    testing.assert_exact(build, normal_batches(), config)


def test_checkpointing_switched_between_steps(config):
    def script(trainer, optimizer):
        losses = []
        ways = ["off", "non-reentrant", "reentrant", "off"]
        for (x,), trainer.module.checkpointing in zip(normal_batches(4), ways, strict=True):
            losses.append(update(trainer, optimizer, mean_square(trainer(x))))
        return losses

    testing.compare(lambda: Stack([WithDropout(), WithDropout()]), config, script)


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


def alike():
    """Return layers whose saved tensors are all alike, for inputs of as many rows."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


@pytest.mark.parametrize("product", [1, 3, 4, 5, 6, 7], ids="product-{}".format)
@pytest.mark.parametrize("early_stop", [True, False], ids=["stopped-early", "whole"])
def test_an_operator_tried_again_is_saved_once(product, early_stop):
    """In the forward, or in the recomputation from the fifth product on: tensors would be taken for those before."""
    config = ps.Config(device="cpu", precision="fp32", device_memory="1MiB")
    batches = [torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(step)) for step in range(2)]

    def script(trainer, optimizer):
        for batch in batches:
            fails = OutOfMemoryAt(product) if isinstance(trainer, Engine) else nullcontext()
            with set_checkpoint_early_stop(early_stop), fails:
                loss = mean_square(trainer(batch))
                trainer.backward(loss)
            assert isinstance(fails, nullcontext) or fails.left <= 0
            yield loss
            optimizer.step()
            optimizer.zero_grad()

    testing.compare(lambda: Stack([alike()], "non-reentrant"), config, lambda *args: list(script(*args)))
