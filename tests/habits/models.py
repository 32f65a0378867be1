"""Habits with modules, parameters, optimizers and the engine itself."""

import copy

import torch
from torch import nn
from toys import mean_square

import patrickstar as ps
from patrickstar.testing import assert_same_bits

from .registry import EXACT, REFUSED, WIDTH, backward, batch, build, finish, habit, train

MODULES, OPTIMIZERS, ENGINE = "Parameters and modules", "Optimizers and schedulers", "The engine"


@habit(MODULES, "for name, p in model.named_parameters(): p.norm(), p.mean()")
def _(trainer):
    train(trainer)
    return [f(p.detach()) for _, p in trainer.module.named_parameters() for f in (torch.norm, torch.mean)]


@habit(MODULES, "p.data.mul_(0.9); with torch.no_grad(): p.add_(1)")
def _(trainer):
    losses = train(trainer)
    for p in trainer.module.parameters():
        p.data.mul_(0.9)
        with torch.no_grad():
            p.add_(0.01)
    return losses + train(trainer, 2, first=2)


@habit(MODULES, "p.data.copy_(values), p.copy_(values) in full precision", EXACT)
def _(engine, folder):
    values = torch.full((16,), 1 / 3)
    engine.module.block[0].bias.data.copy_(values)
    with torch.no_grad():
        engine.module.block[3].bias.copy_(values * 2)
    state = engine.state_dict()
    assert_same_bits([values, values * 2], [state["block.0.bias"], state["block.3.bias"]], "the written values")


@habit(MODULES, "nn.init.zeros_(model.head.weight), model.apply(init)")
def _(trainer):
    losses = train(trainer)
    nn.init.zeros_(trainer.module.block[3].bias)
    torch.manual_seed(3)
    trainer.module.block.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)
    return losses + train(trainer, 2, first=2)


@habit(MODULES, "p.requires_grad_(False), and True again later")
def _(trainer):
    losses = train(trainer)
    trainer.module.block[0].requires_grad_(False)
    losses += train(trainer, 2, first=2)
    trainer.module.block[0].requires_grad_(True)
    return losses + train(trainer, 2, first=4)


@habit(MODULES, "nn.utils.parameters_to_vector, vector_to_parameters")
def _(trainer):
    vector = nn.utils.parameters_to_vector(trainer.module.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, trainer.module.parameters())
    return [vector, *train(trainer)]


@habit(MODULES, "module.register_forward_hook, register_full_backward_hook")
def _(trainer):
    seen = []
    trainer.module.block[0].register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    trainer.module.block[3].register_full_backward_hook(lambda module, grads, out: seen.append(out[0].detach()))
    return train(trainer) + seen


@habit(MODULES, "model.eval(), torch.no_grad(), torch.inference_mode()")
def _(trainer):
    train(trainer, 1)
    trainer.module.eval()
    with torch.no_grad():
        results = [trainer(batch(3))]
    with torch.inference_mode():
        results.append(trainer(batch(4)).clone())
    trainer.module.train()
    return [*results, *train(trainer, 1, first=1)]


@habit(MODULES, "torch.utils.checkpoint.checkpoint(block, x)")
def _(trainer):
    block = trainer.module.block
    forward = block.forward
    block.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    losses = train(trainer)
    del block.forward
    return losses


@habit(MODULES, "torch.func.functional_call(model, params, inputs)")
def _(trainer):
    train(trainer, 1)
    values = {name: p.detach() * 0.5 for name, p in trainer.module.named_parameters()}
    return [torch.func.functional_call(trainer.module, values, (batch(),)).detach()]


@habit(MODULES, "vmap(grad(loss), (None, 0))({name: p.detach() ...}, samples)")
def _(trainer):
    def loss(values, sample):
        return mean_square(torch.func.functional_call(trainer.module, values, (sample[None],)))

    train(trainer, 1)
    values = {name: p.detach() for name, p in trainer.module.named_parameters()}
    return [*torch.func.vmap(torch.func.grad(loss), (None, 0))(values, batch()).values()]


@habit(MODULES, "torch.optim.swa_utils.AveragedModel(model) in fp32")
def _(trainer):
    averaged = torch.optim.swa_utils.AveragedModel(trainer.module)
    for step in range(3):
        train(trainer, 1, first=step)
        averaged.update_parameters(trainer.module)
    return [p.detach() for p in averaged.module.parameters()]


@habit(MODULES, "AveragedModel(model) in bf16", REFUSED, r"'words\.weight'.*rounded to torch\.bfloat16.*ps\.EMA")
def _(engine, folder):
    torch.optim.swa_utils.AveragedModel(engine.module).update_parameters(engine.module)


@habit(MODULES, "ema = {k: v.clone() ...}; ema[k].lerp_(model.state_dict()[k], 0.1)", EXACT)
def _(engine, folder):
    ema, expected = (
        {k: v.clone() for k, v in source.items()} for source in (engine.module.state_dict(), engine.state_dict())
    )
    train(engine, 1)
    for name, value in engine.module.state_dict().items():
        ema[name].lerp_(value, 0.1)
    for name, value in engine.state_dict().items():
        expected[name].lerp_(value, 0.1)
    assert_same_bits(expected, ema, "the average")


@habit(MODULES, "ema.data.mul_(0.9).add_(p.data, alpha=0.1) in bf16", REFUSED, r"add_ writes parameter 'words\.weight'")
def _(engine, folder):
    ema = copy.deepcopy(engine.module)
    for average, p in zip(ema.parameters(), engine.module.parameters(), strict=True):
        average.data.mul_(0.9).add_(p.data, alpha=0.1)


@habit(MODULES, "model.half(), model.to(torch.float64)", REFUSED, r"words\.weight.*precision")
def _(engine, folder):
    engine.module.half()


@habit(MODULES, "model.head = nn.Linear(...) after initialize", REFUSED, r"'head\.weight' was replaced")
def _(engine, folder):
    engine.module.head = nn.Linear(16, 32, bias=False)
    engine(batch())


@habit(OPTIMIZERS, "LambdaLR, OneCycleLR, CosineAnnealingLR")
def _(trainer):
    losses = []
    for kind, options in (
        (torch.optim.lr_scheduler.LambdaLR, {"lr_lambda": lambda step: 0.5**step}),
        (torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": 3}),
    ):
        scheduler = kind(trainer.optimizer, **options)
        for step in range(2):
            losses += train(trainer, 1, first=step)
            scheduler.step()
    return losses


@habit(OPTIMIZERS, "ReduceLROnPlateau(optimizer).step(loss)")
def _(trainer):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer, patience=0)
    losses = []
    for step in range(3):
        losses += train(trainer, 1, first=step)
        scheduler.step(1.0)
    return [*losses, torch.tensor(trainer.optimizer.param_groups[0]["lr"])]


@habit(OPTIMIZERS, "for group in optimizer.param_groups: group['lr'] = ...")
def _(trainer):
    losses = train(trainer)
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.1
        group["weight_decay"] = 0.1
    return losses + train(trainer, 2, first=2)


@habit(OPTIMIZERS, "optimizer.zero_grad(set_to_none=False)")
def _(trainer):
    for step in range(4):  # in every other one most parameters get no gradient
        out = trainer.module.block(torch.ones(2, WIDTH)) if step % 2 else trainer(batch(step))
        trainer.backward(mean_square(out))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=False)
    return [p.grad for p in trainer.module.parameters()]


@habit(OPTIMIZERS, "optimizer.step(closure)", EXACT)
def _(engine, folder):
    loss = engine.optimizer.step(lambda: backward(engine))
    assert torch.isfinite(loss)


@habit(OPTIMIZERS, "optimizer.add_param_group of foreign parameters", REFUSED, "does not belong to the engine")
def _(engine, folder):
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    backward(engine)
    finish(engine)


@habit(OPTIMIZERS, "torch.optim classes: Config(optimizer=torch.optim.RMSprop)", EXACT)
def _(engine, folder):
    with ps.initialize(build, ps.Config(device="cpu", optimizer=torch.optim.RMSprop)) as (other, optimizer):
        train(other)
        assert "square_avg" in optimizer.state[other.module.words.weight]


@habit(OPTIMIZERS, "an optimizer instead of its class", REFUSED, "give the class")
def _(engine, folder):
    ps.Config(optimizer=torch.optim.AdamW(nn.Linear(2, 2).parameters()))


@habit(OPTIMIZERS, "ps.EMA(ps.AdamW(...)), with engine.averaged(): ...", EXACT)
def _(engine, folder):
    options = ps.Config(device="cpu", optimizer=ps.EMA(ps.AdamW(lr=1e-2), decay=0.5))
    with ps.initialize(build, options) as (other, _):
        train(other)
        before = other.state_dict()
        with other.averaged():
            assert not torch.equal(before["words.weight"], other.state_dict()["words.weight"])
        assert_same_bits(before, other.state_dict(), "the parameters afterwards")


@habit(ENGINE, "engine.parameters(), engine.named_parameters(), engine.module", EXACT)
def _(engine, folder):
    assert [*engine.parameters()] == [*engine.module.parameters()]
    assert dict(engine.named_parameters()) == dict(engine.module.named_parameters())


@habit(ENGINE, "print(engine), print(config)", EXACT)
def _(engine, folder):
    assert repr(engine).startswith("Engine(Tied, 1,088 parameters, bf16 on cpu") and "step 2" in repr(engine)
    assert "chunk_size=2048" in str(engine.config) and "device='cpu'" in repr(engine.config)


@habit(ENGINE, "ps.initialize(model, {'device_memory': '2GiB', ...}) or a TOML file", EXACT)
def _(engine, folder):
    (folder / "config.toml").write_text('device = "cpu"\nprecision = "fp32"\n[optimizer]\nname = "AdamW"\nlr = 0.1\n')
    options = {"device": "cpu", "precision": "fp32", "optimizer": {"name": "AdamW", "lr": 0.1}}
    results = []
    for given in (options, folder / "config.toml", str(folder / "config.toml"), ps.Config(**options)):
        with ps.initialize(build, given) as (other, _):
            results.append(torch.stack(train(other)))
    assert_same_bits(results[:1] * 3, results[1:], "losses")


@habit(ENGINE, "config.device_memory = '3GiB'", REFUSED, r"Config can't be changed.*model_copy")
def _(engine, folder):
    engine.config.device_memory = "3GiB"


@habit(ENGINE, "with ps.initialize(...) as (engine, optimizer): ...", EXACT)
def _(engine, folder):
    with ps.initialize(build, ps.Config(device="cpu")) as (other, _):
        train(other)
        expected = other.state_dict()
    assert_same_bits(expected, dict(other.module.state_dict()), "the model afterwards")


@habit(ENGINE, "engine.generate(...) of a model without it", REFUSED, "Tied has no method generate")
def _(engine, folder):
    engine.generate(batch())


@habit(ENGINE, "torch.compile(engine)", REFUSED, r"can't compile an engine.*engine\.module\.compile\(\)")
def _(engine, folder):
    torch.compile(engine)


@habit(ENGINE, "torch.amp.GradScaler with precision='fp16'", REFUSED, r"call engine\.backward\(loss\)")
def _(engine, folder):
    with ps.initialize(build, ps.Config(device="cpu", precision="fp16")) as (other, _):
        mean_square(other(batch())).backward()
        other.optimizer.step()


@habit(ENGINE, "with torch.autocast('cpu', torch.bfloat16): ...")
def _(trainer):
    losses = []
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = trainer(batch(step)).float().pow(2).mean()
        trainer.backward(loss)
        finish(trainer)
        losses.append(loss.detach())
    return losses
