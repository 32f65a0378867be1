"""Adapter for `torch.optim` classes: detected states, rejected classes, and the bits of updates on chunks."""

import pytest
import torch
from sampling import nightly
from transformers.optimization import Adafactor

from patrickstar._kernels.eager_backend import PAGE_NUMEL, EagerBackend
from patrickstar._kernels.torch_optim_adapter import Instances, TorchOptimRule, defaults_of, one_by_one
from patrickstar._kernels.torch_optim_probe import probe
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

TORCH = torch.optim


def class_name(value):
    return value.__name__ if isinstance(value, type) else None


class Simple(torch.optim.Optimizer):
    """Base class of the optimizers below: a learning rate and a loop over parameters."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.update(param, param.grad, group, self.state[param])


class Signs(Simple):
    """Element-wise, with a state of an unusual name and a step count that is a Python number."""

    def update(self, param, grad, group, state):
        state["count"] = state.get("count", 0) + 1
        state["so_far"] = state.get("so_far", torch.zeros_like(param)).add_(grad)
        param.sub_(state["so_far"].sign(), alpha=group["lr"] / state["count"])


class Lamb(Simple):
    """Scales its step by the ratio of two norms of a layer."""

    def update(self, param, grad, group, state):
        param.sub_(grad * (param.norm() / grad.norm()), alpha=group["lr"])


class Noisy(Simple):
    """Adds noise drawn per parameter."""

    def update(self, param, grad, group, state):
        param.sub_(grad + torch.randn_like(grad), alpha=group["lr"])


class ByGlobalNorm(Simple):
    """Reads all gradients before it updates any parameter, as Prodigy and D-Adaptation do."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.pow(2).sum() for param in params]).sum().sqrt()
        for param in params:
            param.sub_(param.grad / norm, alpha=self.param_groups[0]["lr"])


# States

STATES = [
    (TORCH.SGD, {}, ()),
    (TORCH.SGD, {"momentum": 0.9, "nesterov": True}, ("momentum_buffer",)),
    (TORCH.SGD, {"weight_decay": 0.1, "maximize": True}, ()),
    (TORCH.Adam, {"weight_decay": 0.1}, ("exp_avg", "exp_avg_sq")),
    (TORCH.AdamW, {}, ("exp_avg", "exp_avg_sq")),
    (TORCH.AdamW, {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    (TORCH.AdamW, {"fused": True}, ("exp_avg", "exp_avg_sq")),
    (TORCH.RMSprop, {}, ("square_avg",)),
    (TORCH.RMSprop, {"momentum": 0.9, "centered": True}, ("square_avg", "momentum_buffer", "grad_avg")),
    (TORCH.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.01}, ("sum",)),
    (TORCH.Adadelta, {}, ("square_avg", "acc_delta")),
    (TORCH.Adamax, {}, ("exp_avg", "exp_inf")),
    (TORCH.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, ("exp_avg", "exp_avg_sq")),
    (TORCH.RAdam, {}, ("exp_avg", "exp_avg_sq")),
    (TORCH.Rprop, {}, ("prev", "step_size")),
    (TORCH.ASGD, {"t0": 2, "lambd": 0.1}, ("ax",)),
    (Signs, {"lr": 0.3}, ("so_far",)),
    (Signs, {"lr": 0.0}, ("so_far",)),
]


@pytest.mark.parametrize(("kind", "options", "names"), STATES, ids=class_name)
def test_the_states_that_a_class_shows(kind, options, names):
    alone, random_state = one_by_one(kind, options), torch.random.get_rng_state()
    assert probe(kind, alone) == (names, False, (), False)
    if alone != options and (nightly() or kind in (TORCH.SGD, TORCH.AdamW)):
        assert probe(kind, options) == (names, False, (), False)
    assert torch.equal(random_state, torch.random.get_rng_state()), "the caller's random numbers are left alone"


@pytest.mark.parametrize(
    ("kind", "options", "names"),
    [
        (Lamb, {}, ()),
        (TORCH.Adafactor, {"lr": 0.1}, ()),
        (Adafactor, {}, ()),
        (Adafactor, {"relative_step": False, "lr": 0.1, "beta1": 0.9}, ("exp_avg",)),
        (TORCH.Muon, {}, ("momentum_buffer",)),
    ],
    ids=class_name,
)
def test_a_class_that_needs_whole_parameters_is_recognized(kind, options, names):
    assert probe(kind, one_by_one(kind, options)) == (names, True, (), False)


@pytest.mark.parametrize("kind", [ByGlobalNorm, Noisy], ids=class_name)
def test_what_does_not_update_a_parameter_alone_needs_all_at_once(kind):
    """The adapter passes one parameter at a time to a new optimizer, which would be a different algorithm."""
    assert probe(kind, {}).together


@pytest.mark.parametrize("kind", [TORCH.LBFGS, TORCH.SparseAdam], ids=class_name)
def test_what_does_not_take_a_dense_matrix_is_refused_by_name(kind):
    with pytest.raises(ConfigError, match=rf"{kind.__name__}.*can't update a matrix") as caught:
        probe(kind, {})
    assert "\n" not in str(caught.value) and "ps.AdamW" in str(caught.value)


def test_the_loop_over_tensors_is_chosen_unless_something_else_is_asked_for():
    assert one_by_one(TORCH.RMSprop, {"lr": 0.1}) == {"foreach": False, "lr": 0.1}
    assert one_by_one(TORCH.RMSprop, {"foreach": True}) == {"foreach": True}
    assert one_by_one(TORCH.AdamW, {"fused": True}) == {"fused": True}
    assert one_by_one(Signs, {"lr": 0.1}) == {"lr": 0.1}


def test_the_defaults_of_a_class_are_its_own():
    assert defaults_of(Signs, {}) == {"lr": 0.1}
    assert defaults_of(Signs, {"lr": 0.5}) == {"lr": 0.5}
    param = torch.nn.Parameter(torch.zeros(3))
    (group,) = TORCH.NAdam([param], lr=0.5).param_groups
    assert defaults_of(TORCH.NAdam, {"lr": 0.5}) == {name: item for name, item in group.items() if name != "params"}


# Bits

SHAPES = [(1,), (5, 7), (3, 4, 5), (1000,)]


class Chunks:
    """Parameters in chunk lists, separated by NaN, and updated by a `TorchOptimRule`."""

    def __init__(self, kind, options, values, names=(), dtype=torch.float32):
        options = one_by_one(kind, options)
        self.instances, self.group, self.names = Instances(kind, options), defaults_of(kind, options), names
        self.masters, *states = (
            [self._in_chunk(value, number) for number, value in enumerate(values)] for _ in range(1 + len(self.names))
        )
        self.views = dict(zip(self.names, states, strict=True))
        self.params = [master.to(dtype) for master in self.masters]
        for master, value in zip(self.masters, values, strict=True):
            master.copy_(value.flatten())
        self.memories = [{} for _ in values]
        self.steps = 0

    @staticmethod
    def _in_chunk(value, number):
        chunk = torch.full((64 + 32 * number + value.numel(),), float("nan"))
        return chunk[32 * number :][: value.numel()]

    def step(self, grads):
        self.steps += 1
        spans = []
        for number, grad in enumerate(grads):
            rule = TorchOptimRule(self.instances, self.group, self.names, self.memories[number], self.steps)
            states = tuple(self.views[name][number] for name in self.names)
            flat = grad.flatten()
            spans.append(Span(self.params[number], Gradient(flat), self.masters[number], states, rule))
        EagerBackend().update(spans, ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "options", "names"), STATES, ids=class_name)
def test_over_chunks_a_class_gives_its_own_bits(kind, options, names, dtype):
    """Compare steps of the optimizer class on separate tensors with steps of the rule."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    params = [torch.nn.Parameter(value.clone()) for value in values]
    theirs, ours = kind(params, **one_by_one(kind, options)), Chunks(kind, options, values, names, dtype)
    for _ in range(5):
        grads = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.float()
        theirs.step()
        ours.step(grads)
        for number, param in enumerate(params):
            assert torch.equal(param.detach().flatten(), ours.masters[number])
            assert torch.equal(param.detach().flatten().to(dtype), ours.params[number])
            for name in ours.names:
                assert torch.equal(theirs.state[param][name].flatten(), ours.views[name][number]), name
            rest = {name: item for name, item in theirs.state[param].items() if name not in ours.names}
            assert rest == ours.memories[number]


def test_a_learning_rate_that_changes_is_followed():
    values = [torch.ones(40)]
    param = torch.nn.Parameter(values[0].clone())
    theirs, ours = TORCH.RMSprop([param], foreach=False), Chunks(TORCH.RMSprop, {}, values, ("square_avg",))
    for lr in (0.1, 0.5, 0.0, 0.3):
        ours.group = ours.group | {"lr": lr, "initial_lr": 0.1}  # as a scheduler writes
        theirs.param_groups[0]["lr"] = lr
        param.grad = torch.full((40,), lr + 1)
        theirs.step()
        ours.step([param.grad])
        assert torch.equal(param.detach(), ours.masters[0])


def test_a_state_that_only_one_group_has_is_refused_by_name():
    ours = Chunks(TORCH.SGD, {}, [torch.ones(40)])
    ours.group = ours.group | {"momentum": 0.9}
    says = r"SGD created the state 'momentum_buffer' of shape \(40,\).*all param groups"
    with pytest.raises(ConfigError, match=says):
        ours.step([torch.ones(40)])


def test_a_group_may_do_without_a_state_that_others_have():
    ours = Chunks(TORCH.SGD, {"momentum": 0.9}, [torch.ones(40)], ("momentum_buffer",))
    theirs = Chunks(TORCH.SGD, {}, [torch.ones(40)])
    ours.group = ours.group | {"momentum": 0.0}
    for _ in range(3):
        ours.step([torch.ones(40)])
        theirs.step([torch.ones(40)])
    assert torch.equal(ours.masters[0], theirs.masters[0])


def test_a_class_gets_its_parameter_whole():
    """PyTorch's vector code computes the end of a tensor differently, so page boundaries would change bits."""
    lengths = []

    class Watched(Signs):
        def update(self, param, grad, group, state):
            lengths.append(param.numel())

    rule = TorchOptimRule(Instances(Watched, {}), {"lr": 0.1}, (), {}, 1)
    numel = PAGE_NUMEL + 3
    master = torch.zeros(numel)
    EagerBackend().update([Span(master, Gradient(master), master, (), rule)], ())
    assert lengths == [numel]
