"""Default device: results do not depend on it, and host tensors of the library stay on the host.

The meta device stands for a GPU. A tensor created on it by mistake has no data, so that reading it fails.
"""

import contextlib
import dataclasses
from functools import partial

import pytest
import torch
from toys import Shape, batches, train
from transformers import GPT2Config, GPT2LMHeadModel

import patrickstar as ps

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


def run(module, options, folder, data, mode, loop, **hooks):
    """Run, save twice and load under a mode; return all results that a user sees."""
    results = []
    torch.manual_seed(1)
    with mode(), ps.Engine(module, options, meter=ps.testing.NoMeter(), poison=True, **hooks) as engine:

        def go_on():
            results.extend(train(engine, data, **loop))

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
        engine.backward(engine(*data[0]))
        results.append(engine.gradient("words.weight"))
        engine.optimizer.step()
    states = [value for state in optimizer["state"].values() for value in state.values()]
    values = [*states, *(value.detach().clone() for value in module.state_dict().values())]
    return [*results, *(value for value in values if isinstance(value, torch.Tensor))]


@pytest.mark.parametrize(
    ("mode", "precision", "optimizer", "loop", "kind"),
    [
        pytest.param(by_context, "bf16", "AdamW", {"max_norm": 0.1, "accumulation": 2}, "", marks=pytest.mark.slow),
        (set_by_function, "bf16", "AdamW", {"max_norm": 0.1, "accumulation": 2}, ""),
        (by_context, "fp16", "AdamW", {"max_norm": 0.1}, ""),
        (by_context, "fp32", "AdamW", {"accumulation": 2}, "evicted"),
        pytest.param(by_context, "bf16", "torch.optim.Adam", {"max_norm": 0.1}, "", marks=pytest.mark.slow),
        (by_context, "fp32", "torch.optim.RMSprop", {}, "evicted"),
        (by_context, "bf16", "AdamW", {"accumulation": 2, "max_norm": 0.1}, "disk"),
    ],
)
def test_training_and_checkpoints_have_the_same_bits(mode, precision, optimizer, loop, kind, tmp_path):
    memory, shape, hooks = {"activation_offload": True}, SHAPE, {"evict_everything": kind == "evicted"}
    if kind == "disk":
        memory = {"device_memory": 3000, "host_memory": 72_000, "disk": ps.Disk(tmp_path)}
        hooks["page_bytes"], shape = 4096, dataclasses.replace(SHAPE, blocks=("mlp",) * 5)
    options = ps.Config(device="cpu", precision=precision, chunk_size=1024, optimizer=OPTIMIZERS[optimizer], **memory)
    data, found = batches(2, length=60), []
    for number, run_mode in enumerate((contextlib.nullcontext, mode)):
        torch.manual_seed(0)
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(run(shape.build(), options, folder, data, run_mode, loop, **hooks))
    assert all(tensor.device.type == "cpu" for tensor in found[1])
    ps.testing.assert_same_bits(*found, "results that a user sees")


def test_a_model_folder_has_the_same_bits(tmp_path):
    shape = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    saved = []
    for number, mode in enumerate((contextlib.nullcontext, by_context)):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
        with mode():
            engine = ps.Engine(model, ps.Config(device="cpu", chunk_size=1024), meter=ps.testing.NoMeter())
            engine.save_pretrained(tmp_path / str(number))
            engine.close()
        saved.append((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert saved[0] == saved[1]
