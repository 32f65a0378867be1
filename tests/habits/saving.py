"""Habits of saving, loading and copying."""

import copy
import pickle

import accelerate
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from autograd.zoo import through_a_file
from torch import nn

import patrickstar as ps
from patrickstar.testing import assert_same_bits

from .registry import EXACT, REFUSED, batch, build, config, habit, managed, train

SAVING = "Saving and loading"


def check(engine, found, what="the saved state"):
    """Assert that `found` has the masters of an engine, and that the engine goes on with the same bits."""
    assert_same_bits(engine.state_dict(), {name: value.detach() for name, value in found.items()}, what)


def other(engine, load):
    """Load into an engine that was trained differently, and compare what follows with plain training on."""
    twin = managed("bf16")
    train(twin, 1, first=5)
    load(twin)
    assert_same_bits(engine.state_dict(), twin.state_dict(), "the loaded state")
    ids = batch(7)
    with torch.no_grad():
        assert_same_bits([engine(ids)], [twin(ids)], "the output after loading")
    twin.close(keep=False)


@habit(SAVING, "model.state_dict()", EXACT)
def _(engine, folder):
    check(engine, engine.module.state_dict())
    check(engine, {name: value.clone() for name, value in engine.module.state_dict().items()})


@habit(SAVING, "model.layer.state_dict()", EXACT)
def _(engine, folder):
    block = {f"block.{name}": value for name, value in engine.module.block.state_dict().items()}
    assert_same_bits(engine.state_dict(list(block)), block, "the block")


@habit(SAVING, "torch.save(model.state_dict(), path); torch.load(path)", EXACT)
def _(engine, folder):
    state = through_a_file(engine.module.state_dict())
    check(engine, state)
    assert {type(value) for value in state.values()} == {torch.Tensor}
    assert state["words.weight"].data_ptr() == state["head.weight"].data_ptr(), "tied tensors are saved once"


@habit(SAVING, "model.load_state_dict(torch.load(path))", EXACT)
def _(engine, folder):
    other(engine, lambda twin: twin.module.load_state_dict(through_a_file(engine.module.state_dict())))


@habit(SAVING, "model.load_state_dict(other_model.state_dict())", EXACT)
def _(engine, folder):
    other(engine, lambda twin: twin.module.load_state_dict(engine.module.state_dict()))


@habit(SAVING, "model.load_state_dict(partial, strict=False)", EXACT)
def _(engine, folder):
    part = {"block.0.bias": torch.full((16,), 1 / 3)}
    before = engine.state_dict()
    result = engine.module.load_state_dict(part, strict=False)
    assert "block.0.weight" in result.missing_keys and not result.unexpected_keys
    check(engine, before | part)


@habit(SAVING, "model.load_state_dict of another model", REFUSED, "Missing key")
def _(engine, folder):
    engine.module.load_state_dict({"nothing": torch.ones(1)})


@habit(SAVING, "best = copy.deepcopy(model.state_dict()); later load_state_dict(best)", EXACT)
def _(engine, folder):
    best, expected = copy.deepcopy(engine.module.state_dict()), engine.state_dict()
    train(engine)
    engine.module.load_state_dict(best)
    assert_same_bits(expected, engine.state_dict(), "the best state")


@habit(SAVING, "model.state_dict()[name].copy_(...), .mul_(...)", EXACT)
def _(engine, folder):
    expected = engine.state_dict()
    expected["block.3.weight"] *= 1 / 3
    expected["block.0.bias"] = torch.full((16,), 0.1)
    state = engine.module.state_dict()
    state["block.3.weight"].mul_(1 / 3)
    state["block.0.bias"].copy_(torch.full((16,), 0.1))
    check(engine, expected)
    assert torch.equal(engine.module.block[0].bias.detach(), expected["block.0.bias"].bfloat16())


@habit(SAVING, "safetensors.torch.save_file(model.state_dict() without tied names, path)", EXACT)
def _(engine, folder):
    state = engine.module.state_dict()
    del state["head.weight"]
    safetensors.torch.save_file(state, folder / "model.safetensors")
    found = safetensors.torch.load_file(folder / "model.safetensors")
    check(engine, found | {"head.weight": found["words.weight"]})


@habit(SAVING, "safetensors.torch.save_model(model, path); load_model(model, path)", EXACT)
def _(engine, folder):
    safetensors.torch.save_model(engine.module, str(folder / "model.safetensors"))
    plain = build()
    safetensors.torch.load_model(plain, folder / "model.safetensors")
    check(engine, plain.state_dict())
    other(engine, lambda twin: safetensors.torch.load_model(twin.module, folder / "model.safetensors"))


@habit(SAVING, "torch.distributed.checkpoint.save and load of model.state_dict()", EXACT)
def _(engine, folder):
    dcp.save({"model": engine.module.state_dict()}, checkpoint_id=folder / "dcp")
    found = {"model": build().state_dict()}
    dcp.load(found, checkpoint_id=folder / "dcp")
    check(engine, found["model"])
    other(engine, lambda twin: dcp.load({"model": twin.module.state_dict()}, checkpoint_id=folder / "dcp"))


@habit(SAVING, "accelerator.save_model(model, folder)", EXACT)
def _(engine, folder):
    accelerate.Accelerator(cpu=True).save_model(engine.module, folder)
    plain = build()
    safetensors.torch.load_model(plain, folder / "model.safetensors")
    check(engine, plain.state_dict())


@habit(SAVING, "accelerator.prepare(model, optimizer); save_state(folder), load_state(folder)", EXACT)
def _(engine, folder):
    def prepared(of):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(of.module, of.optimizer)
        return accelerator

    prepared(engine).save_state(folder / "state")
    other(engine, lambda twin: prepared(twin).load_state(folder / "state"))
    twin = managed("bf16")
    train(twin, 1, first=5)
    prepared(twin).load_state(folder / "state")
    assert_same_bits(train(engine, 2, first=2), train(twin, 2, first=2), "losses of the resumed run")
    check(engine, twin.state_dict())


@habit(SAVING, "accelerator.get_state_dict(model), unwrap_model(model)", EXACT)
def _(engine, folder):
    accelerator = accelerate.Accelerator(cpu=True)
    check(engine, accelerator.get_state_dict(accelerator.prepare(engine.module)))
    assert accelerator.unwrap_model(engine.module) is engine.module


@habit(SAVING, "torch.save(model, path)", EXACT)
def _(engine, folder):
    loaded = through_a_file(engine.module, weights_only=False)
    check(engine, loaded.state_dict())
    assert loaded.head.weight is loaded.words.weight and type(loaded.head.weight) is nn.Parameter
    loaded(batch()).sum().backward()


@habit(SAVING, "copy.deepcopy(model), as a teacher or reference model", EXACT)
def _(engine, folder):
    twin = copy.deepcopy(engine.module)
    check(engine, twin.state_dict())
    expected = {name: value.clone() for name, value in twin.state_dict().items()}
    train(engine)
    assert_same_bits(expected, dict(twin.state_dict()), "the copy after steps")


@habit(SAVING, "pickle.dumps(model)", EXACT)
def _(engine, folder):
    pickled = pickle.dumps(engine.module)
    check(engine, pickle.loads(pickled).state_dict())
    assert b"patrickstar" not in pickled, "the copy loads without this package"


@habit(SAVING, "pickle.dumps(p), copy.deepcopy(p)", EXACT)
def _(engine, folder):
    weight, full = engine.module.block[0].weight, engine.state_dict()["block.0.weight"]
    assert_same_bits([full, full], [copy.deepcopy(weight).data, pickle.loads(pickle.dumps(weight)).data], "the copies")


@habit(SAVING, "torch.save(engine), copy.deepcopy(engine)", REFUSED, r"can't be pickled or copied.*engine\.save")
def _(engine, folder):
    torch.save(engine, folder / "engine.pt")


@habit(SAVING, "torch.save(optimizer)", REFUSED, r"optimizer of an engine can't be pickled.*state_dict")
def _(engine, folder):
    torch.save(engine.optimizer, folder / "optimizer.pt")


@habit(SAVING, "torch.save(optimizer.state_dict()); optimizer.load_state_dict(...)", EXACT)
def _(engine, folder):
    twin = managed("bf16")
    train(twin, 1, first=5)
    twin.module.load_state_dict(through_a_file(engine.module.state_dict()))
    twin.optimizer.load_state_dict(through_a_file(engine.optimizer.state_dict()))
    assert_same_bits(train(engine), train(twin), "losses after loading")
    check(engine, twin.state_dict())


@habit(SAVING, "optimizer.state[p]['exp_avg'].norm(), .zero_()", EXACT)
def _(engine, folder):
    saved = engine.optimizer.state_dict()["state"]
    weight = engine.module.words.weight
    assert_same_bits([saved[0]["exp_avg"].norm()], [engine.optimizer.state[weight]["exp_avg"].norm()], "the norm")
    engine.optimizer.state[weight]["exp_avg"].zero_()
    assert not engine.optimizer.state_dict()["state"][0]["exp_avg"].any()
    assert set(engine.optimizer.state) == set(engine.parameters())


@habit(SAVING, "for states in optimizer.state.values(): states[key] = states[key].to(device)", EXACT)
def _(engine, folder):
    before = engine.optimizer.state_dict()["state"]
    for states in engine.optimizer.state.values():
        for key, value in states.items():
            states[key] = value.to("cpu")
            states[key] = value.clone()
    after = engine.optimizer.state_dict()["state"]
    for number, states in before.items():
        assert_same_bits(states, after[number], "states")


@habit(SAVING, "engine.save(path); engine.load(path)", EXACT)
def _(engine, folder):
    engine.save(folder / "checkpoint")
    other(engine, lambda twin: twin.load(folder / "checkpoint"))


@habit(SAVING, "a state dict that is kept after engine.close()", EXACT)
def _(engine, folder):
    twin = managed("bf16")
    expected, state = twin.state_dict(), twin.module.state_dict()
    twin.close()
    assert_same_bits(expected, {name: value.clone() for name, value in state.items()}, "the state after closing")


@habit(SAVING, "the optimizer's state after engine.close()", REFUSED, r"engine of parameter 'words\.weight' is closed")
def _(engine, folder):
    twin = managed("bf16")
    train(twin, 1)
    state = twin.optimizer.state[twin.module.words.weight]["exp_avg"]
    twin.close()
    state.norm()


@habit(SAVING, "nn.Parameter(model.state_dict()[name])", REFUSED, r"'words\.weight' is stored in chunks.*clone\(\)")
def _(engine, folder):
    nn.Parameter(engine.module.state_dict()["words.weight"])


@habit(
    SAVING,
    "model.register_buffer('adjacency', sparse); engine.save(path)",
    REFUSED,
    r"adjacency.*sparse_coo, which safetensors cannot store: store it dense",
)
def _(engine, folder):
    model = build()
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    with ps.initialize(model, config("fp32"))[0] as sparse:
        with pytest.raises(ps.errors.ModelError, match="'adjacency' has layout"):
            sparse.save_pretrained(folder / "model")
        sparse.save(folder / "checkpoint")


@habit(SAVING, "ps.Checkpoints(folder).save(engine, step); load(engine)", EXACT)
def _(engine, folder):
    ps.Checkpoints(folder / "run").save(engine, 2, {"step": 2})
    other(engine, lambda twin: ps.Checkpoints(folder / "run").load(twin))
