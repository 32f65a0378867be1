"""Building blocks and inputs for the models of the zoo."""

import functools
import inspect
import io

import torch
import torch.nn as nn
import torch.nn.functional as F
import toys
from torch.utils.checkpoint import checkpoint

import patrickstar as ps

WIDTH = 8


def small_chunks(precision, *, chunk_bytes=1024, optimizer=None):
    """Return a configuration with several chunks even for the smallest model; AdamW unless `optimizer` is given."""
    optimizer = optimizer or ps.AdamW(lr=1e-2, weight_decay=0.1)
    return ps.Config(device="cpu", device_memory=None, chunk_size=chunk_bytes, precision=precision, optimizer=optimizer)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(vocabulary, *shape, seed=0):
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def normal_batches(steps=3, *shape):
    return [(normal(*(shape or (2, 3, WIDTH)), seed=step),) for step in range(steps)]


def next_token_loss(logits, batch):
    (ids,) = batch
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def train(trainer, steps=3, first=0):
    """Train on the normal batches from `first` on."""
    return toys.train(trainer, normal_batches(first + steps)[first:])


def trains(build, config=None, **options):
    """Make a test of a training loop: the tensors that it yields, and all states, are those of plain PyTorch.

    Parameters of `build`, and those of the loop behind trainer and optimizer, are fixtures; so is `config` by default.
    """

    def decorate(loop):
        of_build = [name for name, each in inspect.signature(build).parameters.items() if each.default is each.empty]
        of_loop = list(inspect.signature(loop).parameters)[2:]

        @functools.wraps(loop)
        def test(**fixtures):
            model_func = functools.partial(build, **{name: fixtures[name] for name in of_build})
            more = {name: fixtures[name] for name in of_loop}
            script = lambda *trainer: list(loop(*trainer, **more))  # noqa: E731
            ps.testing.compare(model_func, config or fixtures["config"], script, **options)

        names = dict.fromkeys([*of_build, *of_loop, *([] if config else ["config"])])
        test.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        return test

    return decorate


def compare_steps(build, config, step, count=3):
    """Compare training in which a step returns tensors, or yields them: `step(trainer, optimizer, x)`."""

    def script(trainer, optimizer):
        return [value for (x,) in normal_batches(count) for value in step(trainer, optimizer, x)]

    ps.testing.compare(build, config, script)


def through_a_file(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def weight():
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)


def mlp():
    return nn.Sequential(linear(), nn.GELU(), linear(), nn.Tanh(), linear())


def call_block(block, x, checkpointing):
    if checkpointing == "off":
        return block(x)
    return checkpoint(block, x, use_reentrant=checkpointing == "reentrant")


class Stack(nn.Module):
    """A stem, optionally checkpointed blocks and a head, as in most models."""

    def __init__(self, blocks, checkpointing="off"):
        super().__init__()
        self.stem, self.blocks, self.head = linear(), nn.ModuleList(blocks), linear()
        self.checkpointing = checkpointing

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = call_block(block, x, self.checkpointing if self.training else "off")
        return self.head(x)


def assert_blocks_exact(block_func, config, checkpointing="off"):
    """Assert exact training of two such blocks in a stack for three steps."""
    ps.testing.assert_exact(lambda: Stack([block_func(), block_func()], checkpointing), normal_batches(), config)
