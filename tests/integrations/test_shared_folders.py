"""Model folders with several processes: sharded loading, collective saving, and errors in all processes."""

import resource

import pytest
import torch
from distributed import ranks
from safetensors.torch import load_file

from patrickstar.errors import CheckpointError
from patrickstar.integrations.transformers import from_pretrained
from patrickstar.integrations.transformers._model_folder import TensorInFile

from .tiny import batch, logits, plain, small_chunks, step

NAMES = ["llama", "mixtral"]


class Counted:
    """Counter of bytes and keys that are read."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.keys: set[str] = set()
        read_into = TensorInFile.read_into

        def counting(stored: TensorInFile, target: torch.Tensor, first: int) -> None:
            self.nbytes += target.nbytes
            self.keys.add(stored.key)
            read_into(stored, target, first)

        TensorInFile.read_into = counting  # type: ignore[method-assign]
        self.stop = lambda: setattr(TensorInFile, "read_into", read_into)


def loads_and_saves(name: str, folder: str) -> None:
    """Load only owned shards in each process, and save collectively."""
    model, model_class = plain(name)
    counted = Counted()
    # Chunks are smaller than the embedding, so it is sharded; each other parameter has one owner.
    engine, optimizer = from_pretrained(f"{folder}/{name}", small_chunks(), model_class=model_class)
    counted.stop()
    world = engine.world
    own = {param: engine.layout.local_location(param)[0].numel for param, _ in engine.module.named_parameters()}
    assert 0 in own.values(), "some parameters have another owner"
    assert any(0 < own[param] < value.numel() for param, value in model.named_parameters()), "some are sharded"
    assert counted.nbytes == 4 * sum(own.values())
    assert sum(world.all_gather_object(sum(own.values()))) == sum(param.numel() for param in model.parameters())
    if name == "llama":
        assert counted.keys == {param for param, numel in own.items() if numel}
    assert torch.equal(logits(engine.eval(), batch(model)), logits(model, batch(model)))
    step(engine.train(), optimizer)
    engine.save_pretrained(f"{folder}/out {name}", max_shard_bytes=20_000)
    state = engine.state_dict()
    found = model_class.from_pretrained(f"{folder}/out {name}").state_dict()
    assert found.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(found[key], value), key
    engine.close()


def reports_errors(folder: str) -> None:
    """Errors of rank 0 are raised in all processes, which can continue."""
    engine, optimizer = from_pretrained(f"{folder}/llama", small_chunks("bf16"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="llama already exists and was not changed"):
            engine.save_pretrained(f"{folder}/llama")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, limits[1]))
    with pytest.raises(CheckpointError, match="File too large"):
        engine.save_pretrained(f"{folder}/out", max_shard_bytes=8_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    step(engine, optimizer)
    engine.save_pretrained(f"{folder}/out", dtype="bf16")
    saved = load_file(f"{folder}/out/model.safetensors")
    for key, value in engine.state_dict().items():
        assert torch.equal(saved[key], value.bfloat16()), key
    engine.close()


def run_all(folder: str) -> None:
    """Run all cases in one start of the processes, since importing transformers is slow."""
    for name in NAMES:
        loads_and_saves(name, folder)
    reports_errors(folder)


def test_folders_of_two_processes(tmp_path):
    for name in NAMES:
        plain(name)[0].save_pretrained(tmp_path / name, max_shard_size="20KB")
    ranks.run(2, run_all, 600, folder=str(tmp_path))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["llama", "mixtral", "out", "out llama", "out mixtral"]
