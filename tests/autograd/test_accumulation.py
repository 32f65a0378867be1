"""Several backwards before one step, and steps in which some parameters get no gradient."""

import pytest
import torch
import torch.nn as nn
from toys import mean_square, module, update

from patrickstar import testing

from .zoo import WIDTH, Stack, call_block, compare_steps, linear, mlp, normal, normal_batches, trains


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulation_with_a_last_short_batch(accumulation, config, checkpointing):
    batches = [*normal_batches(6), (normal(1, 3, WIDTH, seed=6),)]
    testing.assert_exact(
        lambda: Stack([mlp(), linear()], checkpointing), batches, config, accumulation=accumulation, max_norm=0.1
    )


def two_forwards_then_two_backwards(trainer, optimizer, x):
    first, second = mean_square(trainer(x)), mean_square(trainer(-x) - 1)
    trainer.backward(first)
    return first.detach(), update(trainer, second)


def two_forwards_then_one_backward(trainer, optimizer, x):
    return [update(trainer, mean_square(trainer(x)) + mean_square(trainer(-x) - 1))]


def one_forward_with_two_losses(trainer, optimizer, x):
    output = trainer(x)
    first, second = mean_square(output), output.float().abs().mean()
    trainer.backward(first, retain_graph=True)
    return first.detach(), update(trainer, second)


def a_discarded_gradient(trainer, optimizer, x):
    """Call zero_grad without a step: the gradients are discarded and the weights unchanged."""
    trainer.backward(mean_square(trainer(x * 7)))
    optimizer.zero_grad()
    return [update(trainer, mean_square(trainer(x)))]


def a_forward_without_backward(trainer, optimizer, x):
    return mean_square(trainer(x * 7)).detach(), update(trainer, mean_square(trainer(x)))


def a_step_without_backward(trainer, optimizer, x):
    loss = update(trainer, mean_square(trainer(x)))
    optimizer.step()
    optimizer.zero_grad()
    return [loss]


def zeroing_before_backward_instead_of_after_the_step(trainer, optimizer, x):
    optimizer.zero_grad()
    loss = mean_square(trainer(x))
    trainer.backward(loss)
    optimizer.step()
    return [loss.detach()]


def a_backward_through_weights_of_an_earlier_step(trainer, optimizer, x):
    """The weights that the graph saved have changed: PyTorch detects this, and the engine must not hide it."""
    stale = mean_square(trainer(-x))
    loss = update(trainer, mean_square(trainer(x)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trainer.backward(stale)
    optimizer.zero_grad()
    return [loss]


STEPS = (
    *(two_forwards_then_two_backwards, two_forwards_then_one_backward, one_forward_with_two_losses),
    *(a_discarded_gradient, a_forward_without_backward, a_step_without_backward),
    *(zeroing_before_backward_instead_of_after_the_step, a_backward_through_weights_of_an_earlier_step),
)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_unusual_steps(step, config, recomputing):
    compare_steps(lambda: Stack([mlp(), linear()], recomputing), config, step)


@trains(lambda: Stack([mlp()]))
def test_accumulation_changes_from_step_to_step(trainer, optimizer):
    for step, micro_batches in enumerate([1, 3, 1, 2]):
        for (x,) in normal_batches(micro_batches):
            loss = mean_square(trainer(x + step))
            trainer.backward(loss)
            yield loss.detach()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["hook", "post-accumulate hook"])
@trains(lambda: Stack([mlp(), linear()]))
def test_hooks_of_the_user_on_a_parameter(trainer, optimizer, kind):
    """Hooks run once per backward, and the gradient that they return is used."""
    calls, weight = [], trainer.module.head.weight
    if kind == "hook":
        weight.register_hook(lambda grad: calls.append(grad) or grad * 0.5)
    else:
        weight.register_post_accumulate_grad_hook(lambda param: calls.append(param))
    for number, (x,) in enumerate(normal_batches(), start=1):
        yield update(trainer, mean_square(trainer(x)))
        assert len(calls) == number


@pytest.mark.parametrize("chosen", [[(0,), (1,), (0,)], [(0, 1), (), (1, 0)]], ids=["one each", "both, none, both"])
def test_a_branch_not_taken(chosen, config, checkpointing):
    def forward(m, x, *chosen):
        x = m.stem(x)
        return sum((call_block(m.branches[index], x, checkpointing) for index in chosen), start=x)

    build = module(forward, stem=linear, branches=lambda: nn.ModuleList([mlp(), mlp()]), never_used=linear)
    batches = [(*batch, *branches) for batch, branches in zip(normal_batches(), chosen, strict=True)]
    testing.assert_exact(build, batches, config)


class Experts(nn.Module):
    """Routes each token to one of four experts; the router's bias leaves some experts without tokens."""

    def __init__(self, call_idle_experts, checkpointing):
        super().__init__()
        self.stem, self.router, self.experts = linear(), nn.Linear(WIDTH, 4), nn.ModuleList([mlp() for _ in range(4)])
        self.call_idle_experts, self.checkpointing = call_idle_experts, checkpointing

    def forward(self, x, favoured):
        x = self.stem(x)
        scores = self.router(x).float().softmax(-1)
        chosen = (scores + favoured.float()).argmax(-1)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any() or self.call_idle_experts:
                routed = call_block(expert, x[mine], self.checkpointing)
                output[mine] = routed * scores[..., index][mine][:, None].to(routed.dtype)
        return output


@pytest.mark.parametrize("call_idle_experts", [False, True], ids=["skipped", "called with no tokens"])
def test_an_expert_without_tokens(call_idle_experts, config, checkpointing):
    favoured = [torch.tensor([9.0, 0, 0, 0]), torch.tensor([-9.0, 0, 0, -9]), torch.tensor([0.0, 0, 9, 0])]
    batches = [(*batch, bias) for batch, bias in zip(normal_batches(), favoured, strict=True)]
    testing.assert_exact(lambda: Experts(call_idle_experts, checkpointing), batches, config)
