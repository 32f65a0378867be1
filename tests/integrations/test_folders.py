"""Loading and saving of model folders: same tensors and logits as transformers.

With several processes: sharded loading, collective saving, and errors in all processes.
"""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from distributed import ranks
from laws.tiers import files_no_larger_than
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules import module as torch_module

import patrickstar as ps
from patrickstar._checkpoint.safetensors_file import SafetensorsFile
from patrickstar.errors import CheckpointError, ConfigError, ModelError
from patrickstar.integrations.transformers import from_pretrained
from patrickstar.integrations.transformers._model_builder import parameters_on_meta
from patrickstar.integrations.transformers._model_folder import TensorInFile
from patrickstar.testing import assert_same_bits

from . import tiny
from .tiny import CAUSAL, MODELS, batch, engine_of, logits, plain, small_chunks, step


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", MODELS)
def test_folders_of_transformers_and_of_the_engine_give_the_same_logits(name, tmp_path):
    model, model_class = plain(name)
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    engine = engine_of(tmp_path / "in", small_chunks(), model_class, evict_everything=True, poison=True).eval()
    assert_same_bits(dict(model.state_dict()), dict(engine.state_dict()), "tensors")
    assert torch.equal(logits(engine, batch(model)), logits(model, batch(model)))
    engine.close()
    engine, optimizer = from_pretrained(tmp_path / "in", small_chunks(), model_class=model_class)
    step(engine, optimizer)
    engine.save_pretrained(tmp_path / "out", max_shard_bytes=20_000)
    state, expected = engine.state_dict(), logits(engine.eval(), batch(model))
    engine.close()
    found, info = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert type(found) is type(model)
    assert found.dtype is torch.float32
    assert_same_bits(dict(state), dict(found.state_dict()), "tensors")
    assert not torch.equal(logits(model, batch(model)), expected)
    assert torch.equal(logits(found.eval(), batch(model)), expected)
    again, _ = from_pretrained(tmp_path / "out", small_chunks(), model_class=model_class)
    assert_same_bits(dict(state), dict(again.state_dict()), "tensors")


def test_tied_parameters_are_saved_once_and_computed_buffers_never(tmp_path):
    model, _ = plain("llama tied")
    engine = ps.Engine(model, small_chunks())
    engine.save_pretrained(tmp_path / "out", max_shard_bytes=30_000)
    files = files_of(tmp_path / "out")
    assert files.keys() == {name for name, _ in model.named_parameters()}
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == files.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in files.values())
    for shard in set(index["weight_map"].values()):
        held = [value.nbytes for value in load_file(tmp_path / "out" / shard).values()]
        assert sum(held) <= 30_000 or len(held) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", None])
def test_parameters_are_rounded_to_the_requested_dtype(dtype, tmp_path):
    torch.manual_seed(0)
    model = tiny.gpt2()
    engine, optimizer = ps.initialize(model, small_chunks("bf16"))
    step(engine, optimizer)
    engine.save_pretrained(tmp_path / "out", dtype=dtype)
    chosen = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    masters = engine.state_dict()
    for name, value in files_of(tmp_path / "out").items():
        assert torch.equal(value, masters[name].to(chosen)), name
        if dtype == "bf16":
            assert torch.equal(value, model.get_parameter(name).detach().clone()), name
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == str(chosen).removeprefix("torch.")
    found = CAUSAL.from_pretrained(tmp_path / "out")
    assert found.dtype is chosen
    if dtype == "bf16":
        assert torch.equal(logits(found.eval(), batch(model)), logits(engine.eval(), batch(model)))


def test_nan_is_rounded_like_in_torch_operators(tmp_path):
    model = tiny.gpt2()
    weight = model.transformer.wpe.weight
    with torch.no_grad():
        weight[0, 0], weight[0, 1] = float("nan"), float("inf")
        weight.view(torch.int32)[0, 2] = 0x7F800001  # a NaN whose upper half alone is an infinity
    engine, _ = ps.initialize(model, small_chunks("bf16"))
    engine.save_pretrained(tmp_path / "out", dtype="bf16")
    saved = files_of(tmp_path / "out")["transformer.wpe.weight"].view(torch.int16)[0, :3].tolist()
    assert saved == [0x7FC0, 0x7F80, 0x7FC0]


def test_frozen_parameters_keep_their_dtype(tmp_path):
    model = tiny.gpt2()
    model.transformer.requires_grad_(False)
    model.transformer.h[0].requires_grad_(True)
    engine, optimizer = ps.initialize(model, small_chunks("bf16"))
    step(engine, optimizer)
    engine.save_pretrained(tmp_path / "out")
    state = engine.state_dict()
    files = files_of(tmp_path / "out")
    for name, value in files.items():
        trained = name.startswith("transformer.h.0.")
        assert value.dtype is (torch.float32 if trained else torch.bfloat16)
        assert torch.equal(value, state[name])
    # transformers loads all parameters in the wider dtype, so nothing is lost.
    found = CAUSAL.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], value.float()) for name, value in files.items())
    engine.save_pretrained(tmp_path / "rounded", dtype="bf16")
    assert {value.dtype for value in files_of(tmp_path / "rounded").values()} == {torch.bfloat16}


class Odd(nn.Module):
    """Model with buffers of several dtypes, one not persistent; unusual strides, empty and integer tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.ones(5), persistent=False)
        self.transposed = nn.Parameter(torch.randn(5, 3).t())
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.counts = nn.Parameter(torch.arange(7), requires_grad=False)


def test_model_that_is_not_from_transformers(tmp_path):
    engine, _ = ps.initialize(Odd, small_chunks())
    engine.save_pretrained(tmp_path / "deep" / "out")
    assert [file.name for file in (tmp_path / "deep/out").iterdir()] == ["model.safetensors"]
    assert_same_bits(dict(engine.state_dict()), dict(load_file(tmp_path / "deep/out/model.safetensors")), "tensors")
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "out"]


def test_unusual_strides_are_filled_from_a_source_of_parts():
    class Source:
        def __init__(self, values: dict[str, torch.Tensor]) -> None:
            self.values = values
            self.parts: list[str] = []

        def __call__(self, name: str) -> torch.Tensor:
            return self.values[name]

        def part(self, name: str, first: int, numel: int) -> torch.Tensor:
            self.parts.append(name)
            return self.values[name].reshape(-1)[first : first + numel].clone()

    model, values = Odd(), Odd().state_dict()
    for module in (model, model.norm):
        for name, param in list(module.named_parameters(recurse=False)):
            meta = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
            setattr(module, name, nn.Parameter(meta, requires_grad=param.requires_grad))
    source = Source(values)
    engine, _ = ps.initialize(model, small_chunks(), source)
    assert set(source.parts) == {"norm.weight", "norm.bias", "empty", "counts"}
    state = engine.state_dict()
    assert all(torch.equal(state[name], values[name]) for name, _ in model.named_parameters())
    assert model.transposed.stride() == (1, 3)


def test_master_parameters_on_disk_are_read_by_page(tmp_path, monkeypatch):
    model, _ = plain("llama")
    model.save_pretrained(tmp_path / "in")
    config = small_chunks(device_memory=48_000, host_memory=110_000, disk=ps.Disk(tmp_path))
    engine = engine_of(tmp_path / "in", config, meter=ps.testing.NoMeter(), page_bytes=4096)
    step(engine, engine.optimizer)
    state = engine.state_dict()
    pieces = []
    write = SafetensorsFile.write
    monkeypatch.setattr(SafetensorsFile, "write", lambda self, piece: (pieces.append(piece.nbytes), write(self, piece)))
    engine.save_pretrained(tmp_path / "out")
    assert pieces.count(4096) > 3, "data on disk is read by page"
    assert_same_bits(dict(state), dict(files_of(tmp_path / "out")), "tensors")
    step(engine, engine.optimizer)


def test_options_override_the_configuration(tmp_path):
    model, _ = plain("llama")
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(tmp_path / "in")
    options = {"attn_implementation": "eager", "attention_dropout": 0.25}
    engine, _ = from_pretrained(str(tmp_path / "in"), small_chunks(), **options)
    assert engine.module.training
    assert engine.module.config._attn_implementation == "eager"
    assert engine.module.config.attention_dropout == 0.25
    assert engine.module.generation_config.max_new_tokens == 17
    engine.save_pretrained(tmp_path / "out")
    engine.close()
    found = CAUSAL.from_pretrained(tmp_path / "out")
    assert (found.config.attention_dropout, found.generation_config.max_new_tokens) == (0.25, 17)
    assert found.config.architectures == ["LlamaForCausalLM"]
    with pytest.raises(ConfigError, match=r"no option no_such_thing$"):
        from_pretrained(tmp_path / "in", no_such_thing=1)


@pytest.mark.parametrize(
    ("name", "stored_as"),
    [
        ("gpt2", lambda key: key.removeprefix("transformer.")),  # written without the head
        ("llama tied", lambda key: "lm_head.weight" if "embed_tokens" in key else key),
    ],
)
def test_other_names_are_found(tmp_path, name, stored_as):
    model, model_class = plain(name)
    model.save_pretrained(tmp_path)
    stored = {stored_as(key): value for key, value in files_of(tmp_path).items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    engine, _ = from_pretrained(tmp_path, small_chunks(), model_class=model_class)
    assert_same_bits(dict(model.state_dict()), dict(engine.state_dict()), "tensors")


def test_old_names_and_duplicate_names_are_found(tmp_path):
    model, model_class = plain("bert")
    model.save_pretrained(tmp_path / "in")
    tensors = load_file(tmp_path / "in/model.safetensors")
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in tensors.items()}
    old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): value for name, value in old.items()}
    assert old.keys() != tensors.keys()
    embedding = old["bert.embeddings.word_embeddings.weight"]
    old |= {"bert.embeddings.position_ids": torch.arange(64), "cls.predictions.decoder.weight": embedding.clone()}
    save_file(old, tmp_path / "in/model.safetensors", {"format": "pt"})
    engine, _ = from_pretrained(tmp_path / "in", small_chunks(), model_class=model_class)
    assert_same_bits(dict(model.state_dict()), dict(engine.state_dict()), "tensors")
    engine.close()
    old["cls.predictions.decoder.weight"] = embedding + 1
    save_file(old, tmp_path / "in/model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"word_embeddings\.weight and cls\.predictions\.decoder\.weight.*different"):
        from_pretrained(tmp_path / "in", small_chunks(), model_class=model_class)


def test_tensors_that_only_transformers_can_split_are_reported_with_a_remedy(tmp_path):
    model = tiny.nomic_bert().eval()
    model.save_pretrained(tmp_path / "in")
    with pytest.raises(ModelError, match=r"q_proj\.weight' is stored in .*Wqkv.*\(Chunk\).*save_original_format=False"):
        from_pretrained(tmp_path / "in", small_chunks(), model_class=tiny.MASKED)
    tiny.MASKED.from_pretrained(tmp_path / "in").save_pretrained(tmp_path / "new", save_original_format=False)
    engine, _ = from_pretrained(tmp_path / "new", small_chunks(), model_class=tiny.MASKED)
    assert torch.equal(logits(engine.eval(), batch(model)), logits(model, batch(model)))


def test_existing_targets_are_not_changed(tmp_path):
    engine, optimizer = ps.initialize(tiny.gpt2(), small_chunks())
    (tmp_path / "taken").mkdir()
    engine.save_pretrained(tmp_path / "taken")  # an empty folder is not taken
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "taken").iterdir()}
    (tmp_path / "file").write_text("mine")
    for place in ("taken", "file"):
        with pytest.raises(CheckpointError, match=rf"{place} already exists and was not changed"):
            engine.save_pretrained(tmp_path / place)
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "taken").iterdir()} == before
    for options, message in (
        ({"dtype": "int8"}, "'int8' is not supported"),
        ({"max_shard_bytes": "many"}, "no size|not a size"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.save_pretrained(tmp_path / "new", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]
    step(engine, optimizer)


def test_parameters_on_meta_keeps_buffers_sharing_and_flags() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(3), requires_grad=False)
            self.first, self.second = weight, weight
            self.none = None
            self.register_parameter("absent", None)
            self.register_buffer("buffer", torch.ones(2))

    with parameters_on_meta():
        model = Shared()
    assert model.first is model.second
    assert model.first.is_meta
    assert not model.first.requires_grad
    assert torch.equal(model.buffer, torch.ones(2))
    assert not torch_module._global_parameter_registration_hooks

    with pytest.raises(RuntimeError, match="in the middle"), parameters_on_meta():
        raise RuntimeError("in the middle")
    assert not torch_module._global_parameter_registration_hooks


# Several processes


def loads_and_saves(name: str, folder: str) -> None:
    """Load only owned shards in each process, and save collectively."""
    model, model_class = plain(name)
    with mock.patch.object(TensorInFile, "read_into", autospec=True, side_effect=TensorInFile.read_into) as read_into:
        # Chunks are smaller than the embedding, so it is sharded; each other parameter has one owner.
        engine, optimizer = from_pretrained(f"{folder}/{name}", small_chunks(), model_class=model_class)
    reads = [each.args for each in read_into.call_args_list]
    world = engine.world
    own = {param: engine.layout.local_location(param)[0].numel for param, _ in engine.module.named_parameters()}
    assert 0 in own.values(), "some parameters have another owner"
    assert any(0 < own[param] < value.numel() for param, value in model.named_parameters()), "some are sharded"
    assert sum(target.nbytes for _, target, _ in reads) == 4 * sum(own.values())
    assert sum(world.all_gather_object(sum(own.values()))) == sum(param.numel() for param in model.parameters())
    if name == "llama":
        assert {stored.key for stored, *_ in reads} == {param for param, numel in own.items() if numel}
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
    with files_no_larger_than(16_000), pytest.raises(CheckpointError, match="File too large"):
        engine.save_pretrained(f"{folder}/out", max_shard_bytes=8_000)
    step(engine, optimizer)
    engine.save_pretrained(f"{folder}/out", dtype="bf16")
    saved = load_file(f"{folder}/out/model.safetensors")
    for key, value in engine.state_dict().items():
        assert torch.equal(saved[key], value.bfloat16()), key
    engine.close()


def run_all(folder: str) -> None:
    """Run all cases in one start of the processes, since importing transformers is slow."""
    for name in ("llama", "mixtral"):
        loads_and_saves(name, folder)
    reports_errors(folder)


def test_folders_of_two_processes(tmp_path):
    for name in ("llama", "mixtral"):
        plain(name)[0].save_pretrained(tmp_path / name, max_shard_size="20KB")
    ranks.run(2, run_all, folder=str(tmp_path))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["llama", "mixtral", "out", "out llama", "out mixtral"]
