"""Parameters of every kind, and ways in which a model accesses its weights, also in place."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrizations
from toys import mean_square, module, update

from patrickstar import testing

from .zoo import WIDTH, Stack, assert_blocks_exact, linear, normal_batches, small_chunks, train, trains, weight


def mixed_dtypes(m, x):
    hidden = torch.tanh(m.low(x.to(m.low.weight.dtype)))
    return m.high(hidden.to(m.high.weight.dtype)).to(x.dtype)


class SavingMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, matrix):
        ctx.save_for_backward(x, matrix)
        return x @ matrix

    @staticmethod
    def backward(ctx, grad):
        x, matrix = ctx.saved_tensors
        return grad @ matrix.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


class TwoMatmuls(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, first, second):
        hidden = x @ first
        ctx.save_for_backward(x, hidden, first, second)
        return hidden @ second

    @staticmethod
    def backward(ctx, grad):
        x, hidden, first, second = ctx.saved_tensors
        through = grad @ second.t()
        return (
            through @ first.t(),
            x.flatten(0, 1).t() @ through.flatten(0, 1),
            hidden.flatten(0, 1).t() @ grad.flatten(0, 1),
        )


class StashingMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, matrix):
        ctx.save_for_backward(x)
        ctx.matrix = matrix
        return x @ matrix

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.matrix.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


class StashingModule(torch.autograd.Function):
    """Reads the weight from the module in forward and backward, not from its arguments."""

    @staticmethod
    def forward(ctx, x, matrix, module):
        ctx.save_for_backward(x)
        ctx.module = module
        return x @ module.weight

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.module.weight.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2), None


def norm():
    layer = nn.LayerNorm(WIDTH).requires_grad_(False)
    nn.init.uniform_(layer.weight)
    return layer


def bias_only():
    layer = linear()
    layer.weight.requires_grad_(False)
    return layer


larger_than_a_chunk = module(
    lambda m, x: m.down(torch.relu(m.up(x))),
    up=lambda: nn.Linear(WIDTH, 16 * WIDTH),
    down=lambda: nn.Linear(16 * WIDTH, WIDTH),
)
# A frozen base with a trainable low-rank correction.
adapter = module(
    lambda m, x: torch.tanh(m.base(x) + m.up(m.down(x))),
    base=lambda: linear().requires_grad_(False),
    down=lambda: nn.Linear(WIDTH, 2, bias=False),
    up=lambda: nn.Linear(2, WIDTH, bias=False),
)
wholly_frozen = module(
    lambda m, x: m.inner(x), inner=lambda: nn.Sequential(linear(), nn.GELU(), linear()).requires_grad_(False)
)
KINDS = {
    "scalar": module(
        lambda m, x: m.linear(x * m.scale) + m.scale, scale=lambda: nn.Parameter(torch.tensor(0.5)), linear=linear
    ),
    "empty": module(
        lambda m, x: F.linear(x, torch.cat([m.weight, m.nothing])),
        nothing=lambda: nn.Parameter(torch.empty(0, WIDTH)),
        weight=weight,
    ),
    "empty and unused": module(lambda m, x: m.linear(x), nothing=lambda: nn.Parameter(torch.empty(0)), linear=linear),
    "larger than a chunk": larger_than_a_chunk,
    "not contiguous": module(
        lambda m, x: F.linear(F.linear(x, m.weight), m.weight.t()),
        weight=lambda: nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t()),
    ),
    "weight norm": module(lambda m, x: m.linear(x), linear=lambda: parametrizations.weight_norm(linear())),
    "saved by a function": module(lambda m, x: SavingMatmul.apply(x, m.weight), weight=weight),
    "two saved by a function": module(lambda m, x: TwoMatmuls.apply(x, m.first, m.second), first=weight, second=weight),
    "stashed by a function": module(lambda m, x: StashingMatmul.apply(x, m.weight), weight=weight),
    "read from its module by a function": module(lambda m, x: StashingModule.apply(x, m.weight, m), weight=weight),
    "view stashed by a function": module(lambda m, x: StashingMatmul.apply(x, m.weight.t()), weight=weight),
    "frozen norm": module(lambda m, x: m.after(m.norm(m.before(x))), before=linear, norm=norm, after=linear),
    "adapter": adapter,
    "trainable bias only": module(lambda m, x: torch.tanh(m.linear(x)), linear=bias_only),
    "wholly frozen": wholly_frozen,
}


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_kind(kind, config, recomputing):
    assert_blocks_exact(KINDS[kind], config, recomputing)


def test_mixed_dtypes(config):
    build = module(mixed_dtypes, low=lambda: linear().to(torch.bfloat16), high=lambda: linear().to(torch.float32))
    testing.assert_exact(lambda: nn.Sequential(build(), build()), normal_batches(), config)


def test_spectral_norm_which_updates_buffers_from_weights(checkpointing):
    # Its buffers must have the weights' dtype, so plain PyTorch must run it in one precision.
    build = module(lambda m, x: m.linear(x), linear=lambda: parametrizations.spectral_norm(linear()))
    assert_blocks_exact(build, small_chunks("fp32"), checkpointing)


def test_frozen_base_with_adapters_alone_trainable(config):
    def adapted():
        model = Stack([adapter(), adapter()])
        model.stem.requires_grad_(False)
        model.head.requires_grad_(False)
        return model

    testing.assert_exact(adapted, normal_batches(), config)


def test_frozen_first_layers_whose_inputs_need_no_gradient(config):
    build = lambda: nn.Sequential(wholly_frozen(), wholly_frozen(), linear(), wholly_frozen())  # noqa: E731
    testing.assert_exact(build, normal_batches(), config)


def first_block(first_state, checkpointing):
    model = Stack([linear(), linear()], checkpointing)
    model.blocks[0].requires_grad_(first_state)
    return model


@pytest.mark.parametrize("first_state", [True, False], ids=["frozen-later", "unfrozen-later"])
@trains(first_block)
def test_a_parameter_changes_between_frozen_and_trainable(trainer, optimizer, first_state):
    for first, state in ((0, first_state), (2, not first_state), (4, first_state)):
        trainer.module.blocks[0].requires_grad_(state)
        yield from train(trainer, steps=2, first=first)


@trains(lambda: Stack([linear(), linear()]))
def test_everything_frozen_but_one_parameter_at_a_time(trainer, optimizer):
    """Block-wise training, as in layer-by-layer fine-tuning."""
    for step, (x,) in enumerate(normal_batches(4)):
        for index, block in enumerate(trainer.module.blocks):
            block.requires_grad_(index == step % 2)
        yield update(trainer, mean_square(trainer(x)))


@pytest.mark.parametrize("chunk_bytes", [64, 256, 1024, 65536, "auto"])
def test_any_chunk_size(chunk_bytes, precision):
    config = small_chunks(precision, chunk_bytes=chunk_bytes)
    testing.assert_exact(lambda: Stack([larger_than_a_chunk(), adapter()]), normal_batches(), config)


def detached_after_use(m, x):
    x = m.other(torch.tanh(m.linear(x)))
    return F.linear(x, m.linear.weight.detach())


def detached_before_use(m, x):
    x = m.other(torch.tanh(F.linear(x, m.linear.weight.detach())))
    return m.linear(x)


def detached_view_kept(m, x):
    constant = m.linear.weight.detach().t()
    return m.other(torch.tanh(m.linear(x))) @ constant


def normalised_without_grad(m, x):
    with torch.no_grad():
        length = m.weight.norm()
    return F.linear(x, m.weight / length)


def transposed_view_kept(m, x):
    transposed = m.weight.t()
    return torch.tanh(m.other(x)) @ transposed


def chunked_views_kept(m, x):
    query, key, value = m.packed.weight.chunk(3)
    x = torch.tanh(m.other(x))
    return F.linear(x, query) * F.linear(x, key) + F.linear(m.other(x), value)


def returned_by_its_module(m, x):
    held = m.holder()
    return F.linear(torch.tanh(m.other(x)), held)


def indexed(m, x):
    chosen = m.table[torch.tensor([0, 2, 2])]
    return x * chosen + m.table[1] - m.table[:2].sum(0)


def in_parameter_list(m, x):
    for each in m.weights:
        x = torch.tanh(F.linear(x, each))
    return x


def reads_metadata(m, x):
    x, w = m.other(x), m.weight
    assert w.shape == (WIDTH, WIDTH) and w.size(0) == len(w) == WIDTH
    assert w.stride() == (WIDTH, 1) and w.is_contiguous() and w.is_leaf
    assert w.numel() == WIDTH**2 and w.dim() == w.ndim == 2
    assert w.device == x.device and w.requires_grad
    return F.linear(x.to(w.dtype).view(-1, w.shape[1]), w).view_as(x)


# In-place operators


def activation_on_output(m, x):
    return m.after(F.relu_(m.linear(x).add_(1)))


def residual_added(m, x):
    hidden = m.first(x)
    hidden += m.second(torch.tanh(x))
    return hidden


def output_is_a_view(m, x):
    flat = m.inner(x)
    flat.mul_(2).relu_()
    return m.after(flat).view_as(x)


def output_is_its_input(m, x):
    hidden = m.linear(x)
    same = m.identity(hidden)
    same.add_(1)
    return m.after(hidden) + same


def output_is_a_view_of_its_input(m, x):
    hidden = m.linear(x)
    m.flatten(hidden).mul_(2)
    return m.after(hidden)


def writes_into_its_input(m, x):
    hidden = m.before(x)
    return m.inner(hidden) + hidden


def writes_into_its_buffer(m, x):
    x = m.linear(x)
    with torch.no_grad():
        m.running.lerp_(x.mean((0, 1)).to(m.running.dtype), 0.1)
    return x + m.running.to(x.dtype).clone()


view_of_a_linear = module(lambda m, x: m.linear(x).view(-1, WIDTH), linear=linear)
doubles_its_input = module(lambda m, x: m.linear(x.mul_(2)), linear=linear)
multiply_by_a_view = module(lambda m, x, view: torch.tanh(m.linear(x)) @ view, linear=linear)
USES = {
    "called twice": module(lambda m, x: m.linear(torch.tanh(m.linear(x))), linear=linear),
    "used by the parent": module(lambda m, x: F.linear(x, m.uncalled.weight, m.uncalled.bias), uncalled=linear),
    "used by the parent and called": module(lambda m, x: m.linear(torch.tanh(x @ m.linear.weight)), linear=linear),
    "detached after use": module(detached_after_use, linear=linear, other=linear),
    "detached before use": module(detached_before_use, linear=linear, other=linear),
    "detached view kept": module(detached_view_kept, linear=linear, other=linear),
    "normalised without grad": module(normalised_without_grad, weight=weight),
    "transposed view kept": module(transposed_view_kept, weight=weight, other=linear),
    "chunked views kept": module(chunked_views_kept, packed=lambda: nn.Linear(WIDTH, 3 * WIDTH), other=linear),
    "view passed to another module": module(
        lambda m, x: m.multiply(x, m.weight.view(WIDTH, WIDTH).t()), weight=weight, multiply=multiply_by_a_view
    ),
    "returned by its module": module(
        returned_by_its_module, holder=module(lambda m: m.weight, weight=weight), other=linear
    ),
    "indexed": module(indexed, table=lambda: nn.Parameter(torch.randn(4, WIDTH))),
    "cast to float": module(lambda m, x: F.linear(x.float(), m.weight.float()).to(x.dtype), weight=weight),
    "in einsum": module(lambda m, x: torch.einsum("bsi,oi->bso", x, m.weight), weight=weight),
    "expanded": module(
        lambda m, x: torch.cat([m.token.expand(x.shape[0], -1, -1), x], dim=1)[:, 1:] * m.token,
        token=lambda: nn.Parameter(torch.randn(1, 1, WIDTH)),
    ),
    "functional call": module(
        lambda m, x: torch.func.functional_call(m.inner, {"weight": m.inner.weight * m.scale}, (x,)),
        inner=linear,
        scale=weight,
    ),
    "in a parameter list": module(in_parameter_list, weights=lambda: nn.ParameterList([weight() for _ in range(3)])),
    "in a parameter dict": module(
        lambda m, x: F.linear(torch.tanh(F.linear(x, m.weights["up"])), m.weights["down"]),
        weights=lambda: nn.ParameterDict({"up": weight(), "down": weight()}),
    ),
    "reads metadata": module(reads_metadata, weight=weight, other=linear),
    # Linear returns a view of a 3-D input, and none of a 2-D one.
    "activation on an output that is a view": module(activation_on_output, linear=linear, after=linear),
    "activation on an output that is none": module(
        lambda m, x: activation_on_output(m, x.flatten(0, 1)).view_as(x), linear=linear, after=linear
    ),
    "activation modules": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.SiLU(inplace=True)),
    "residual added in place": module(residual_added, first=linear, second=linear),
    "output is a view": module(output_is_a_view, inner=view_of_a_linear, after=linear),
    "output is its input": module(output_is_its_input, linear=linear, identity=nn.Identity, after=linear),
    "output is a view of its input": module(
        output_is_a_view_of_its_input, linear=linear, flatten=lambda: nn.Flatten(0, 1), after=linear
    ),
    "writes into its input": module(writes_into_its_input, before=linear, inner=doubles_its_input),
    "writes into its buffer": module(
        writes_into_its_buffer, linear=linear, running=lambda: nn.Buffer(torch.zeros(WIDTH))
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_weight_in_use(use, config, recomputing):
    assert_blocks_exact(USES[use], config, recomputing)


def test_in_place_activation_on_the_models_output(config):
    def loss_of(output, batch):
        return F.relu_(output).float().pow(2).mean()

    testing.assert_exact(lambda: nn.Sequential(linear(), linear()), normal_batches(), config, loss_fn=loss_of)
