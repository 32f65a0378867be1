"""Adam over views of chunks is bit for bit what `torch.optim` does to tensors of their own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.kernels.adam import AdamStep, adam_update

quick = settings(derandomize=True, deadline=None, max_examples=60)

pytestmark = pytest.mark.usefixtures("one_thread")

HYPERS = st.builds(
    AdamStep,
    lr=st.sampled_from([0.0, 1e-4, 1e-2, 3.0]),
    beta1=st.sampled_from([0.0, 0.9]),
    beta2=st.sampled_from([0.95, 0.999]),
    eps=st.sampled_from([1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
    decoupled=st.booleans(),
)
SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=2).map(tuple), min_size=1, max_size=5)


class Ours:
    """Masters and moments, updated by the kernel; `place` says where each of them lies."""

    def __init__(self, values, hyper, place=torch.clone):
        self.hyper, self.steps = hyper, [0] * len(values)
        self.masters = [place(value) for value in values]
        self.moments = [[place(torch.zeros_like(value)) for value in values] for _ in range(2)]

    def step(self, grads, parts=None):
        """One update, in the given groups of positions, each of which is a call."""
        for part in parts or [range(len(grads))]:
            lists = [[of[i] for i in part] for of in (self.masters, grads, *self.moments)]
            adam_update(*lists, [self.steps[i] for i in part], self.hyper)
        self.steps = [step + 1 for step in self.steps]

    @property
    def tensors(self):
        return [*self.masters, *self.moments[0], *self.moments[1]]


class Theirs:
    """The same with `torch.optim`."""

    def __init__(self, values, hyper):
        self.masters = [torch.nn.Parameter(value.clone()) for value in values]
        kind = torch.optim.AdamW if hyper.decoupled else torch.optim.Adam
        self.optimizer = kind(
            self.masters,
            lr=hyper.lr,
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            fused=True,
        )

    def step(self, grads):
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad.clone()
        self.optimizer.step()

    @property
    def tensors(self):
        states = [self.optimizer.state[master] for master in self.masters]
        return [*self.masters, *(s["exp_avg"] for s in states), *(s["exp_avg_sq"] for s in states)]


def normal(shapes, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def assert_same_bits(ours, theirs):
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@quick
@given(SHAPES, HYPERS, st.sampled_from([torch.float32, torch.float64]))
def test_the_bits_are_those_of_torch(shapes, hyper, dtype):
    values = normal(shapes, seed=0, dtype=dtype)
    ours, theirs = Ours(values, hyper), Theirs(values, hyper)
    for step in range(1, 4):
        grads = normal(shapes, seed=step, dtype=dtype)
        ours.step(grads)
        theirs.step(grads)
        assert_same_bits(ours, theirs)


@quick
@given(SHAPES, HYPERS, st.data())
def test_cutting_an_update_into_several_calls_changes_nothing(shapes, hyper, data):
    values = normal(shapes, seed=0)
    whole, cut = Ours(values, hyper), Ours(values, hyper)
    for step in range(1, 4):
        grads = normal(shapes, seed=step)
        order = data.draw(st.permutations(range(len(shapes))))
        at = data.draw(st.integers(0, len(order)))
        whole.step(grads)
        cut.step(grads, [part for part in (order[:at], order[at:]) if part])
        assert_same_bits(cut, whole)


@quick
@given(st.integers(1, 300), st.integers(0, 20), HYPERS)
def test_where_a_parameter_lies_in_a_chunk_changes_nothing(numel, vectors, hyper):
    def in_a_chunk(value):
        chunk = torch.full((32 * vectors + numel + 7,), float("nan"))
        view = chunk[32 * vectors :][:numel].view(value.shape)
        return view.copy_(value)

    values = normal([(numel,)], seed=0)
    ours, theirs = Ours(values, hyper, in_a_chunk), Theirs(values, hyper)
    for step in range(1, 3):
        grads = normal([(numel,)], seed=step)
        ours.step([in_a_chunk(grads[0])])
        theirs.step(grads)
    assert_same_bits(ours, theirs)


def test_what_lies_around_a_parameter_is_not_touched():
    chunks = [torch.full((96,), 7.0) for _ in range(4)]
    hyper = AdamStep(0.1, 0.9, 0.999, 1e-8, 0.1, decoupled=True)
    adam_update(*([chunk[32:60]] for chunk in chunks), [0], hyper)
    for chunk in chunks:
        assert (chunk[:32] == 7).all() and (chunk[60:] == 7).all()
    assert (chunks[0][32:60] != 7).all()


def test_dense_strides_of_any_order_are_updated_as_torch_does():
    hyper = AdamStep(0.1, 0.9, 0.999, 1e-8, 0.1, decoupled=True)
    values = [normal([(5, 7)], seed=0)[0].t(), normal([(2, 3, 4, 5)], 1)[0].to(memory_format=torch.channels_last)]
    ours, theirs = Ours(values, hyper), Theirs(values, hyper)
    assert [master.stride() for master in ours.masters] == [value.stride() for value in values]
    for step in range(1, 4):
        grads = [torch.empty_like(value).copy_(value * step) for value in values]
        ours.step(grads)
        theirs.step(grads)
    assert_same_bits(ours, theirs)


def test_every_parameter_has_its_own_count_of_steps():
    hyper = AdamStep(0.1, 0.9, 0.999, 1e-8, 0.0, decoupled=False)
    late, early = Ours([torch.ones(8)], hyper), Ours([torch.ones(8)], hyper)
    both = Ours([torch.ones(8), torch.ones(8)], hyper)
    early.step([torch.ones(8)])
    early.step([torch.ones(8)])
    late.step([torch.ones(8)])
    both.step([torch.ones(8), torch.ones(8)], parts=[[0]])
    both.steps = [1, 0]
    both.step([torch.ones(8), torch.ones(8)])
    assert torch.equal(both.masters[0], early.masters[0])
    assert torch.equal(both.masters[1], late.masters[0])


def test_gradients_are_read_only():
    grad = torch.ones(40)
    Ours([torch.ones(40)], AdamStep(0.1, 0.9, 0.999, 1e-8, 0.5, decoupled=False)).step([grad])
    assert (grad == 1).all()
