"""Code that Python's operators do not show: TorchScript, kernels, C++, transforms of torch.func, compiled functions."""

import ctypes
from functools import cache

import pytest
import torch
import torch.nn as nn
from probes import tracer_of
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.cpp_extension import load_inline
from toys import layers, mean_square, module, update

import patrickstar as ps

from .zoo import WIDTH, compare_steps, linear, normal, normal_batches, small_chunks, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    # Dynamo reads .grad of every tensor that it traces, including activations.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


@cache
def script_function():
    return torch.jit.script(product)


def scaled(x, weight):
    return script_function()(x, weight)


@torch.library.custom_op("patrickstar_tests::scaled", mutates_args=())
def scaled_op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


def scaled_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    return grad * weight, (grad * x).sum((0, 1))


scaled_op.register_autograd(scaled_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def at(address):
    """Return a copy of what a kernel would read at an address."""
    return torch.frombuffer((ctypes.c_float * WIDTH).from_address(address), dtype=torch.float32).clone()


class Kernel(torch.autograd.Function):
    """Function whose kernels take the addresses of two parameters, as Triton's do."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        addresses = weight.data_ptr(), bias.data_ptr()
        assert weight.stride(0) == 1 and bias.is_contiguous()
        weight, bias = map(at, addresses)
        return x * weight + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return grad * at(weight.data_ptr()), (grad * x).sum((0, 1)), grad.sum((0, 1))


class Product(torch.autograd.Function):
    """Function with several saved weights."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        return x * weight * bias

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        return grad * weight * bias, (grad * x * bias).sum((0, 1)), (grad * x * weight).sum((0, 1))


def vector():
    return nn.Parameter(normal(WIDTH, seed=9))


def three():
    return layers(WIDTH, 3, nn.Tanh)


def reading(read):
    """Return a model whose `read(x, weight, bias)` is between two layers."""
    forward = lambda m, x: m.after(read(m.before(x), m.weight, m.bias)) + m.weight.sum() + m.bias.sum()  # noqa: E731
    return module(forward, before=linear, after=linear, weight=vector, bias=vector)


# The helper that delays copies, as the package itself.
torch._dynamo.trace_rules.add("late_copies")


@torch.compile(backend="aot_eager")
def compiled(x, weight):
    return torch.relu(x * weight)


READERS = {
    "script function, a copy": lambda x, weight, bias: scaled(x, weight.clone()),
    "script function, detached": lambda x, weight, bias: scaled(x, weight.detach()),
    "script function, a view of data": lambda x, weight, bias: scaled(x, weight.data.view(1, -1)),
    "operator of a library": lambda x, weight, bias: scaled_op(x, weight),
    "kernel": Kernel.apply,
    "compiled function": lambda x, weight, bias: compiled(x, weight),
    "vmap over a copy": lambda x, weight, bias: vmap(lambda each: x * each)(weight.expand(2, -1).clone()).sum(0),
}


@pytest.mark.parametrize("stress", [True, False], ids=["evicted", "resident"])
@pytest.mark.parametrize("reader", READERS)
def test_reader(reader, stress):
    ps.testing.assert_exact(
        reading(READERS[reader]), normal_batches(8), small_chunks("fp32"), accumulation=2, stress=stress
    )


@pytest.fixture
def late(request):
    """True beside an accelerator, whose copies are late."""
    return request.config.getoption("--late-copies") is not None


def check_refused(function):
    """Check that a function is refused by the name of the parameter that it reads, which has been evicted."""
    engine = ps.testing.stressed(reading(function), small_chunks("fp32"))
    with pytest.raises(RuntimeError, match=r"'weight'.* is read outside of Python .*parameter\.clone\(\)"):
        engine(*normal_batches()[0])


@pytest.mark.parametrize("read", [lambda w: w, lambda w: w.view(1, -1)], ids=["parameter", "view"])
def test_native_code_that_reads_an_absent_parameter_is_refused_by_name(read):
    check_refused(lambda x, weight, bias: scaled(x + bias, read(weight)))


def test_native_code_never_reads_a_gradient_as_a_parameter(late):
    engine, optimizer = ps.initialize(linear(), small_chunks("fp32"))
    before = scaled(torch.ones(WIDTH), engine.module.bias)
    engine.backward(mean_square(engine(normal(2, 3, WIDTH))))
    with pytest.raises(RuntimeError, match=r"'bias' is read .* its gradient is stored in their place"):
        scaled(torch.ones(WIDTH), engine.module.bias)
    optimizer.zero_grad()
    # Beside an accelerator the values come back when an operator needs them.
    after = engine.module.bias.clone() if late else engine.module.bias
    assert torch.equal(scaled(torch.ones(WIDTH), after), before)


@pytest.mark.slow
def test_extension_in_cpp():
    source = """
    torch::Tensor scaled(torch::Tensor x, torch::Tensor w) { return x * w; }
    torch::Tensor copied(torch::Tensor w) {
      auto out = torch::empty_like(w);
      memcpy(out.data_ptr(), w.data_ptr(), w.nbytes());
      return out;
    }"""
    extension = load_inline("patrickstar_tests_native", source, functions=["scaled", "copied"])
    for read in (lambda w: w.clone(), lambda w: w.detach()):
        ps.testing.assert_exact(
            reading(lambda x, weight, bias, read=read: extension.scaled(x, read(weight))),
            normal_batches(),
            small_chunks("fp32"),
        )
    for function in (lambda x, weight, bias: extension.scaled(x, weight), lambda x, w, b: x * extension.copied(w)):
        check_refused(function)


SCRIPTED = {
    "scripted": lambda: torch.jit.script(three()),
    "traced": lambda: torch.jit.trace(three(), normal(2, 3, WIDTH)),
}


@pytest.mark.parametrize("reentrant", [None, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("how", SCRIPTED)
def test_block_of_torchscript(how, reentrant):
    def call(m, x):
        return m.block(x) if reentrant is None else checkpoint(m.block, x, use_reentrant=reentrant)

    model = module(lambda m, x: m.after(call(m, m.before(x))), before=linear, block=SCRIPTED[how], after=linear)
    for (x,) in 2 * normal_batches():
        # TorchScript optimizes a function after its first calls, for all modules of the type: with other bits.
        model()(x).sum().backward()

    def script(trainer, optimizer):
        losses = train(trainer)
        saved = {name: value.clone() for name, value in trainer.module.state_dict().items()}
        trainer.module.load_state_dict({name: value * 2 for name, value in saved.items()})
        return [*losses, *saved.values(), *train(trainer)]

    ps.testing.compare(model, small_chunks("fp32"), script)


@pytest.mark.parametrize("first", [0, 1])
def test_function_with_two_forwards_and_two_backwards(first):
    def step(trainer, optimizer, x):
        losses = [trainer(x).sum(), mean_square(trainer(2 * x))]
        trainer.backward(losses.pop(first))
        yield update(trainer, losses[0])

    compare_steps(reading(Product.apply), small_chunks("fp32"), step)


def per_sample(model, x, values=lambda p: p.detach()):
    params = {name: values(p) for name, p in model.named_parameters()}
    return vmap(grad(lambda p, x: mean_square(functional_call(model, p, (x,)))), in_dims=(None, 0))(params, x)


TRANSFORMS = {
    "grad": lambda engine, x: grad(lambda x: mean_square(engine(x)))(x),
    "vmap": lambda engine, x: vmap(engine)(x),
    "jvp": lambda engine, x: torch.stack(jvp(engine, (x,), (x + 1,))),
    "hessian": lambda engine, x: hessian(lambda x: mean_square(engine(x)))(x),
    "gradients of samples": lambda engine, x: torch.cat([g.flatten() for g in per_sample(engine.module, x).values()]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform(transform):
    def step(trainer, optimizer, x):
        out = TRANSFORMS[transform](trainer, x[0])
        yield out.detach()
        yield update(trainer, mean_square(out) if out.requires_grad else mean_square(trainer(x)))

    compare_steps(three, small_chunks("fp32"), step, count=2)


def written(engine, x):
    return vmap(lambda x: engine.module[0][0].weight.detach().mul_(2) @ x)(x)


REFUSED = {
    "of parameters themselves": (lambda engine, x: per_sample(engine.module, x, lambda p: p), RuntimeError, "clone"),
    "that writes": (written, ps.errors.ModelError, "writes parameter '0.0.weight' inside a transform"),
}


@pytest.mark.parametrize("transform", REFUSED)
def test_transform_that_is_refused_by_name(transform, late):
    call, error, message = REFUSED[transform]
    if late and error is RuntimeError:
        message = "out of bounds"  # PyTorch's words: placeholders have no memory beside an accelerator
    with pytest.raises(error, match=message):
        compare_steps(three, small_chunks("fp32"), lambda trainer, optimizer, x: call(trainer, x[0]), count=1)


def test_an_address_that_a_loss_takes_is_an_access_of_the_trace():
    model = reading(lambda x, weight, bias: x)()
    with ps.Engine(model, small_chunks("fp32")) as engine:
        loss = mean_square(engine(*normal_batches(1)[0]))
        moments = len(tracer_of(engine).trace.moments)
        model.weight.data_ptr()
        assert len(tracer_of(engine).trace.moments) == moments + 1
        engine.backward(loss)
