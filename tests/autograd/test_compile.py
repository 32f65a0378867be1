"""`torch.compile` on each block of a model."""

from functools import partial

import pytest
import torch
import torch.nn as nn

from patrickstar import testing

from .zoo import WIDTH, Stack, linear, mlp, normal, normal_batches, train, trains

pytestmark = [
    # Dynamo reads .grad of every tensor that it traces, including activations.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # Raised by PyTorch's own quantization code, which the inductor backend imports.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["wrapped", "in place"])
def compiling(request):
    return request.param


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.body = nn.LayerNorm(WIDTH), mlp()

    def forward(self, x):
        return x + self.body(self.norm(x))


def compiled(block, backend, compiling):
    if compiling == "wrapped":
        return torch.compile(block, backend=backend)
    block.compile(backend=backend)
    return block


def some_compiled(compile_block):
    """Compile some blocks, one of which is used twice and one frozen."""
    shared = compile_block(Block())
    return Stack([shared, Block(), compile_block(Block().requires_grad_(False)), shared])


MODELS = {
    "each block": lambda compile_block: Stack([compile_block(Block()) for _ in range(3)]),
    "recomputed": lambda compile_block: Stack([compile_block(Block()) for _ in range(2)], "non-reentrant"),
    "among others": some_compiled,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_compiled_blocks(backend, model, compiling, config):
    testing.assert_exact(
        lambda: MODELS[model](partial(compiled, backend=backend, compiling=compiling)), normal_batches(), config
    )


@trains(lambda compiling: Stack([compiled(Block(), "aot_eager", compiling) for _ in range(2)]))
def test_compiled_blocks_in_eval_and_with_another_shape(trainer, optimizer):
    for step, length in enumerate([3, 5, 3]):
        trainer.module.eval()
        with torch.no_grad():
            output = trainer(normal(2, length, WIDTH)).clone()
        yield output
        trainer.module.train()
        yield from train(trainer, steps=1, first=step)


@trains(lambda: Stack([Block(), Block()]))
def test_a_block_compiled_after_initialize(trainer, optimizer, compiling):
    yield from train(trainer, steps=1)
    blocks = trainer.module.blocks
    for index in range(2):
        blocks[index] = compiled(blocks[index], "aot_eager", compiling)
    yield from train(trainer, steps=2, first=1)


def test_blocks_compile_once(compiling, config):
    """The engine causes no recompilation: three equal blocks need as many graphs as without it."""
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    counts = []

    def script(trainer, optimizer):
        torch._dynamo.reset()
        graphs.clear()
        losses = train(trainer)
        counts.append(len(graphs))
        return losses

    def build():
        return Stack([compiled(Block(), count, compiling) for _ in range(3)])

    testing.compare(build, config, script)
    plain, managed = counts
    assert 0 < managed <= plain


def test_the_whole_model_compiled(config):
    def build():
        return torch.compile(nn.Sequential(linear(), Block(), linear()), backend="aot_eager")

    testing.assert_exact(build, normal_batches(), config)
