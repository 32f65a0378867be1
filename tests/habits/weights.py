"""Habits with `p.data` and the memory of parameters."""

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import patrickstar as ps

from .registry import EXACT, REFUSED, WIDTH, backward, batch, finish, habit, managed, train

DATA = "Memory of parameters"


def evaluate(trainer):
    with torch.no_grad():
        return trainer(batch(9)).clone()


def weights(trainer):
    return trainer.module.block[0].weight, trainer.module.block[3].weight


@habit(DATA, "backup = p.data; p.data = average; evaluate; p.data = backup")
def _(trainer):
    params = [*trainer.module.parameters()]
    averages, results = [p.data.clone() for p in params], []
    for step in range(3):
        results += train(trainer, 1, first=step)
        for average, p in zip(averages, params, strict=True):
            average.mul_(0.5).add_(p.data, alpha=0.5)
        backup = [p.data for p in params]
        for average, p in zip(averages, params, strict=True):
            p.data = average
        results.append(evaluate(trainer))
        for old, p in zip(backup, params, strict=True):
            p.data = old
    return results + averages


@habit(DATA, "old = p.detach(); p.data = values; values.mul_(2)")
def _(trainer):
    p, values = trainer.module.block[0].bias, torch.full((WIDTH,), 2.0)
    old, part = p.detach(), p.detach()[3:7]
    p.data = values
    values.mul_(2)
    results = [p.detach().clone(), part.clone()]
    old.zero_()
    p.data.add_(1)
    return [*results, values.clone(), part, *train(trainer), values]


@habit(DATA, "old = p.data; p.data = q.data.clone(); q.data = old")
def _(trainer):
    p, q = weights(trainer)
    old = p.data
    p.data = q.data.clone()
    q.data = old
    return train(trainer)


@habit(DATA, "p.data = other_model.q.data; evaluate; p.data = backup")
def _(trainer):
    p, other = weights(trainer)[0], nn.Linear(WIDTH, WIDTH)
    backup, p.data = p.data, other.weight.data
    results = [evaluate(trainer)]
    p.data = backup
    return results + train(trainer)


@habit(DATA, "old = p.data.clone(); p.add_(p.grad); backward; p.data = old")
def _(trainer):
    backward(trainer)
    params = [*trainer.module.parameters()]
    old = [p.data.clone() for p in params]
    with torch.no_grad():
        for p in params:
            p.add_(p.grad, alpha=0.1)
    trainer.optimizer.zero_grad()
    backward(trainer)
    for values, p in zip(old, params, strict=True):
        p.data = values
    finish(trainer)
    return old


@habit(DATA, "p.data.apply_(function), p.data.map_(q, function), p.set_(values)")
def _(trainer):
    p, q = weights(trainer)
    p.data.apply_(lambda value: value / 2)
    p.data.map_(q.detach().clone(), lambda value, other: value + other)
    with torch.no_grad():
        q.set_(torch.ones(WIDTH, WIDTH))
    return train(trainer)


@habit(DATA, "remove_parametrizations(layer, 'weight'), prune.remove(layer, 'weight')")
def _(trainer):
    first, second = trainer.module.block[0], trainer.module.block[3]
    parametrize.register_parametrization(first, "weight", nn.Tanh())
    prune.l1_unstructured(second, "weight", 0.5)
    losses = train(trainer)
    parametrize.remove_parametrizations(first, "weight")
    prune.remove(second, "weight")
    return losses + train(trainer)


@habit(DATA, "part = p[:4]; p.mul_(2), or p.data = values; part.sum().backward()")
def _(trainer):
    p, q = weights(trainer)
    rows, columns = p[:4], q.t()[:, :2]
    with torch.no_grad():
        p.mul_(2)
    q.data = torch.ones(WIDTH, WIDTH)
    (rows.sum() + columns.sum()).backward()
    return [rows, columns, p.grad.clone(), q.grad.clone()]


@habit(DATA, "p.data.data = values; p.data = other_model.q.data; p.data.add_(1)")
def _(trainer):
    p, other = weights(trainer)[0], nn.Linear(WIDTH, WIDTH)
    p.data.data = torch.zeros(WIDTH, WIDTH)
    results = [evaluate(trainer)]
    p.data = other.weight.data
    p.data.add_(1)
    results.append(other.weight.detach())
    p.data = p.data.clone()
    return results + train(trainer)


@habit(DATA, "model.register_buffer('reference', p.data)")
def _(trainer):
    trainer.module.register_buffer("reference", weights(trainer)[0].data, persistent=False)
    return [*train(trainer), trainer.module.reference]


@habit(DATA, "p.data_ptr() == q.data_ptr()")
def _(trainer):
    addresses = {p.data_ptr() for p in trainer.module.parameters()}
    return [torch.tensor(len(addresses)), torch.tensor(trainer.module.head.weight.data_ptr() in addresses)]


@habit(DATA, "backup = p.data; state = model.state_dict(); p.data = average; p.data = backup", EXACT)
def _(engine, folder):
    p, before, state = weights(engine)[0], engine.state_dict(), engine.module.state_dict()
    backup = p.data
    p.data = torch.full_like(p, 0.5)
    ps.testing.assert_same_bits(before, {name: value.clone() for name, value in state.items()}, "the earlier state")
    assert not torch.equal(engine.module.state_dict()["block.0.weight"], before["block.0.weight"])
    p.data = backup
    ps.testing.assert_same_bits(before, engine.state_dict(), "the restored parameters")


@habit(DATA, "p.data = q.data", REFUSED, r"'block\.0\.weight'.*'block\.3\.weight'.*clone\(\)")
def _(engine, folder):
    p, q = weights(engine)
    p.data = q.data


@habit(DATA, "p.data = p.data.t(), p.data = values.t()", REFUSED, r"'block\.0\.weight'.*strides.*copy_")
def _(engine, folder):
    p = weights(engine)[0]
    with pytest.raises(ps.errors.ModelError, match=r"'block\.0\.weight'.*strides"):
        p.data = p.data.t()
    p.data = torch.ones(WIDTH, WIDTH, dtype=p.dtype).t()


@habit(DATA, "p.data = values of another shape", REFUSED, r"'words\.weight'.*resize_token_embeddings.*before")
def _(engine, folder):
    engine.module.words.weight.data = torch.zeros(40, WIDTH, dtype=torch.bfloat16)


@habit(DATA, "p.data = torch.from_numpy(array)", REFUSED, r"'block\.0\.bias'.*numpy.*clone\(\)")
def _(engine, folder):
    array = numpy.zeros(WIDTH, numpy.int16)
    engine.module.block[0].bias.data = torch.from_numpy(array).view(torch.bfloat16)


@habit(DATA, "p.data = other_model.q.data; optimizer.step()", REFUSED, r"'block\.0\.weight'.*others share.*clone\(\)")
def _(engine, folder):
    p, other = weights(engine)[0], nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
    p.data = other.weight.data
    backward(engine)
    with pytest.raises(ps.errors.ModelError, match=r"'block\.0\.weight'.*would change only the parameter"):
        engine.optimizer.step()
    other.weight.data.zero_()
    evaluate(engine)


@habit(DATA, "p.detach().numpy()[:] = 0, model.state_dict()[name].numpy()[:] = 0", REFUSED, "read-only")
def _(engine, folder):
    exact = managed("fp32")
    with pytest.raises(ValueError, match="read-only"):
        weights(exact)[0].detach().numpy()[:] = 0
    exact.close(keep=False)
    engine.module.state_dict()["block.0.weight"].numpy()[:] = 0


@habit(DATA, "torch.from_dlpack(p.data)", REFUSED, r"'block\.0\.weight'.*clone\(\)")
def _(engine, folder):
    torch.from_dlpack(weights(engine)[0].data)


@habit(DATA, "p.t_(), p.resize_(...), model.share_memory()", REFUSED, r"'words\.weight'.*before ps\.initialize")
def _(engine, folder):
    for change in (lambda p: p.t_(), lambda p: p.data.resize_(4, 4), lambda p: p.set_()):
        with pytest.raises(ps.errors.ModelError, match=r"'block\.0\.weight'.*before ps\.initialize"):
            change(weights(engine)[0])
    engine.module.share_memory()


@habit(DATA, "torch.utils.swap_tensors(p, q)", REFUSED, r"'(words|head)\.weight' was replaced")
def _(engine, folder):
    engine.optimizer.zero_grad()
    torch.utils.swap_tensors(engine.module.head.weight, nn.Parameter(torch.ones(32, WIDTH)))
    engine(batch())


@habit(DATA, "engine.save(path) after modules were reordered", REFUSED, r"'block\.0\.weight' is 'block\.3\.weight' now")
def _(engine, folder):
    block = engine.module.block
    block[0], block[3] = block[3], block[0]
    try:
        engine.save(folder / "reordered")
    finally:
        block[0], block[3] = block[3], block[0]
