"""Default device: results do not depend on it, and host tensors of the library stay on the host.

The meta device stands for a GPU. A tensor created on it by mistake has no data, so that reading it fails.
"""

import contextlib
import dataclasses
from functools import partial

import pytest
import torch
from toys import Shape, batches
from transformers import GPT2Config, GPT2LMHeadModel

import patrickstar as ps
from patrickstar import testing
from patrickstar._engine.engine import Engine

SHAPE = Shape(("mlp", "attention", "plain"), tied=True, frozen_norms=True, checkpointing=True)
OPTIMIZERS = {
    "AdamW": ps.AdamW(lr=1e-2, weight_decay=0.1),
    "torch.optim.Adam": partial(torch.optim.Adam, lr=1e-2),
    "torch.optim.RMSprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.9),
}


@contextlib.contextmanager
def set_by_function():
    """Set the default device temporarily, by `torch.set_default_device`."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


by_context = partial(torch.device, "meta")


def steps(engine, data, max_norm, accumulation, results):
    """Train on these batches, and record losses, norms and one gradient."""
    for number, (ids,) in enumerate(data, start=1):
        loss = engine(ids) / accumulation
        engine.backward(loss)
        results.append(loss.detach().clone())
        if number % accumulation:
            continue
        if max_norm is not None:
            results.append(engine.clip_grad_norm_(max_norm))
        results.append(engine.gradient("words.weight"))
        engine.optimizer.step()
        engine.optimizer.zero_grad()


def run(module, options, folder, data, mode, *, max_norm=None, accumulation=1, **hooks):
    """Run, save twice and load under a mode; return all results that a user sees."""
    results = []
    torch.manual_seed(1)
    with mode(), Engine(module, options, meter=testing.NoMeter(), poison=True, **hooks) as engine:
        go_on = partial(steps, engine, data, max_norm, accumulation, results)
        go_on()
        engine.save(folder / "at once", {"note": [1, "two"]})
        engine.save(folder / "beside", wait=False)
        go_on()
        assert engine.finish_saving()
        assert engine.stats.total.disk_write_bytes > 0 or options.disk is None
        results += engine.state_dict().values()
        optimizer = engine.optimizer.state_dict()
        for name, expected in (("at once", {"note": [1, "two"]}), ("beside", {})):
            assert engine.load(folder / name) == expected
            go_on()
            results += engine.state_dict().values()
        engine.load_state_dict(engine.state_dict())
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        go_on()
    states = [value for state in optimizer["state"].values() for value in state.values()]
    values = [*states, *(value.detach().clone() for value in module.state_dict().values())]
    return [*results, *(value for value in values if isinstance(value, torch.Tensor))]


@pytest.mark.parametrize(
    ("mode", "precision", "optimizer", "loop"),
    [
        pytest.param(by_context, "bf16", "AdamW", {"max_norm": 0.1, "accumulation": 2}, marks=pytest.mark.slow),
        (set_by_function, "bf16", "AdamW", {"max_norm": 0.1, "accumulation": 2}),
        (by_context, "fp16", "AdamW", {"max_norm": 0.1}),
        (by_context, "fp32", "AdamW", {"accumulation": 2, "evict_everything": True}),
        pytest.param(by_context, "bf16", "torch.optim.Adam", {"max_norm": 0.1}, marks=pytest.mark.slow),
        (by_context, "fp32", "torch.optim.RMSprop", {"evict_everything": True}),
        (by_context, "bf16", "AdamW", {"disk": True, "accumulation": 2, "max_norm": 0.1}),
    ],
)
def test_training_and_checkpoints_have_the_same_bits(mode, precision, optimizer, loop, tmp_path):
    memory, shape, loop = {"activation_offload": True}, SHAPE, dict(loop)
    if loop.pop("disk", False):
        memory = {"device_memory": 3000, "host_memory": 80_000, "disk": ps.Disk(tmp_path)}
        loop["page_bytes"], shape = 4096, dataclasses.replace(SHAPE, blocks=("mlp",) * 8)
    options = ps.Config(device="cpu", precision=precision, chunk_size=1024, optimizer=OPTIMIZERS[optimizer], **memory)
    data, found = batches(2, length=60), []
    for number, run_mode in enumerate((contextlib.nullcontext, mode)):
        torch.manual_seed(0)
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(run(shape.build(), options, folder, data, run_mode, **loop))
    assert all(tensor.device.type == "cpu" for tensor in found[1])
    testing.assert_same_bits(*found, "results that a user sees")


def test_a_model_folder_has_the_same_bits(tmp_path):
    shape = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    saved = []
    for number, mode in enumerate((contextlib.nullcontext, by_context)):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
        with mode():
            engine = Engine(model, ps.Config(device="cpu", chunk_size=1024), meter=testing.NoMeter())
            engine.save_pretrained(tmp_path / str(number))
            engine.close()
        saved.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert saved[0] == saved[1]
