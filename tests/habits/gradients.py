"""Habits with gradients."""

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from .registry import EXACT, REFUSED, backward, finish, habit, train

GRADIENTS = "Gradients"


def then(trainer, results=()):
    """Finish the step, take another, and return the results with the losses."""
    finish(trainer)
    return [*results, *train(trainer, 1, first=1)]


def params(trainer):
    return list(trainer.module.parameters())


def after_backward(code):
    """Register a habit between a backward and the end of its step: a function that may return tensors to compare."""

    def register(script):
        @habit(GRADIENTS, code)
        def _(trainer):
            backward(trainer)
            return then(trainer, script(trainer) or ())

    return register


@habit(GRADIENTS, "loss.backward()")
def _(trainer):
    trainer(torch.zeros(1, 2, dtype=torch.int64)).pow(2).mean().backward()
    return then(trainer)


@habit(GRADIENTS, "if p.grad is not None: ...")
def _(trainer):
    before = sum(p.grad is not None for p in params(trainer))
    backward(trainer)
    return then(trainer, [torch.tensor([before, sum(p.grad is not None for p in params(trainer))])])


@after_backward("p.grad.norm(), p.grad.abs().max(), p.grad.isnan().any()")
def _(trainer):
    measures = (torch.norm, lambda g: g.abs().max(), lambda g: g.isnan().any())
    return [measure(p.grad) for p in params(trainer) for measure in measures]


after_backward("p.grad.detach().cpu().numpy()")(
    lambda trainer: [torch.from_numpy(p.grad.detach().cpu().numpy().copy()) for p in params(trainer)]
)
after_backward("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")(
    lambda trainer: [nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.01)]
)


after_backward("torch.nn.utils.clip_grad_norm_(..., norm_type=math.inf)")(
    lambda trainer: [nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.01, norm_type=math.inf)]
)
after_backward("torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)")(
    lambda trainer: nn.utils.clip_grad_value_(trainer.module.parameters(), 1e-3)
)


after_backward("torch.nn.utils.get_total_norm([p.grad for p in ...])")(
    lambda trainer: [nn.utils.get_total_norm([p.grad for p in params(trainer)])]
)


@after_backward("p.grad.mul_(2); p.grad /= 3")
def _(trainer):
    for p in params(trainer):
        p.grad.mul_(2)
        p.grad /= 3


@after_backward("p.grad.data.clamp_(-1, 1)")
def _(trainer):
    for p in params(trainer):
        p.grad.data.clamp_(-1e-3, 1e-3)


@after_backward("p.grad.view(-1)[0] = 0; p.grad[1:].zero_()")
def _(trainer):
    for p in params(trainer):
        p.grad.view(-1)[0] = 0
        p.grad[1:].zero_()


@after_backward("p.grad.add_(torch.randn_like(p.grad))")
def _(trainer):
    for number, p in enumerate(params(trainer)):
        torch.manual_seed(number)
        p.grad.add_(torch.randn_like(p.grad))


@after_backward("saved = [p.grad.clone() ...]; p.grad = saved[i] + other[i]")
def _(trainer):
    saved = [p.grad.clone() for p in params(trainer)]
    trainer.optimizer.zero_grad()
    backward(trainer, 1)
    for p, grad in zip(params(trainer), saved, strict=True):
        p.grad = p.grad + grad
    return saved


@after_backward("p.grad = None for some parameters")
def _(trainer):
    for p in params(trainer)[::2]:
        p.grad = None


@habit(GRADIENTS, "p.grad = torch.ones_like(p) without a backward")
def _(trainer):
    for p in params(trainer):
        p.grad = torch.ones_like(p)
    return then(trainer)


@habit(GRADIENTS, "p.grad of a wrong shape or dtype", REFUSED, r"'words\.weight'.*have to be equal")
def _(engine, folder):
    engine.module.words.weight.grad = torch.ones(3)


@after_backward("accumulate: several backwards, then p.grad")
def _(trainer):
    backward(trainer, 1)
    return [p.grad.clone() for p in params(trainer)]


@after_backward("accumulate, and scale the sum: p.grad.div_(steps)")
def _(trainer):
    backward(trainer, 1)
    for p in params(trainer):
        p.grad.div_(2)


@habit(GRADIENTS, "p.register_hook(lambda grad: grad * 2)")
def _(trainer):
    for p in params(trainer):
        p.register_hook(lambda grad: grad * 2)
    backward(trainer)
    return then(trainer)


@habit(GRADIENTS, "p.register_post_accumulate_grad_hook(lambda p: log(p.grad))")
def _(trainer):
    seen = {}
    for index, p in enumerate(params(trainer)):
        p.register_post_accumulate_grad_hook(lambda p, index=index: seen.update({index: p.grad.norm()}))
    backward(trainer)
    return then(trainer, [seen[index] for index in sorted(seen)])


after_backward("torch.cat([p.grad.flatten() for p in ...])")(
    lambda trainer: [torch.cat([p.grad.flatten() for p in params(trainer)])]
)


@after_backward("torch._foreach_mul_([p.grad ...], 0.5)")
def _(trainer):
    grads = [p.grad for p in params(trainer)]
    torch._foreach_mul_(grads, 0.5)
    return torch._foreach_norm(grads)


@habit(GRADIENTS, "model.zero_grad()")
def _(trainer):
    backward(trainer)
    trainer.module.zero_grad()
    return [torch.tensor(sum(p.grad is not None for p in params(trainer))), *train(trainer)]


@habit(GRADIENTS, "model.zero_grad(set_to_none=False) after a step")
def _(trainer):
    train(trainer)
    backward(trainer)
    trainer.optimizer.step()
    trainer.module.zero_grad(set_to_none=False)
    return then(trainer, [p.grad.clone() for p in params(trainer)])


@after_backward("loss.backward(); executor.submit(log, p.norm(), p.grad.norm(), model.state_dict())")
def _(trainer):
    with ThreadPoolExecutor(1) as executor:
        norms = executor.submit(lambda: [norm for p in params(trainer) for norm in (p.norm(), p.grad.norm())])
        values = executor.submit(lambda: [value.clone() for value in trainer.module.state_dict().values()])
        return [*norms.result(), *values.result()]


@habit(GRADIENTS, "engine.clip_grad_norm_(1.0, norm_type=..., error_if_nonfinite=True)", EXACT)
def _(engine, folder):
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        backward(engine)
        grads = [engine.gradient(name) for name, _ in engine.named_parameters()]
        norm = engine.clip_grad_norm_(0.01, norm_type, error_if_nonfinite=True)
        torch.testing.assert_close(norm, nn.utils.get_total_norm(grads, norm_type), rtol=1e-6, atol=0)
        engine.optimizer.zero_grad()


@habit(
    GRADIENTS,
    "p.grad.mul_() after engine.clip_grad_norm_",
    REFUSED,
    r"'words\.weight' can't be changed after engine\.clip",
)
def _(engine, folder):
    backward(engine)
    engine.clip_grad_norm_(1.0)
    engine.module.words.weight.grad.mul_(2)


@habit(
    GRADIENTS,
    "grad = p.grad; optimizer.step(); grad.norm()",
    REFUSED,
    r"gradient of 'words\.weight' does not exist any more",
)
def _(engine, folder):
    backward(engine)
    grad = engine.module.words.weight.grad
    engine.optimizer.step()
    grad.norm()
