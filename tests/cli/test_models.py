"""The model to train: presets, configuration files and local folders."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from patrickstar._models.model_source import find_model
from patrickstar._models.open_models import OPEN_MODELS, find_open_model
from patrickstar._models.presets import EXPERT_PRESETS, PRESETS, T5_PRESETS
from patrickstar._perf_model.experts import Experts
from patrickstar._perf_model.t5_costs import T5
from patrickstar.errors import ConfigError, ModelError

GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 300}
LLAMA = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2, vocab_size=300)


def gpt2() -> transformers.GPT2LMHeadModel:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0))


def llama(tied: bool) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied))


def save(folder: Path, model: Any, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(model.config.to_json_string())
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(names)}
    for shard in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def assert_loads(folder: Path, expected: nn.Module) -> None:
    model, weights = find_model(str(folder)).open(activation_checkpointing=False)
    assert isinstance(model, nn.Module)
    assert weights is not None
    values = dict(expected.named_parameters(remove_duplicate=False))
    own = dict(model.named_parameters(remove_duplicate=False))
    assert own.keys() == values.keys()
    for name, parameter in own.items():
        assert parameter.is_meta
        assert torch.equal(weights(name), values[name]), name
    assert len(list(model.parameters())) == len(list(expected.parameters()))
    buffers = dict(model.named_buffers())
    for name, buffer in expected.named_buffers():
        assert torch.equal(buffers[name], buffer), name


def built(name: str, **options: Any) -> Any:
    """Build a model that is not a folder."""
    build, weights = find_model(name, **options).open(activation_checkpointing=False)
    assert callable(build) and weights is None
    return build()


def numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_it_says(name: str) -> None:
    with torch.device("meta"):
        assert numel(built(name)) == PRESETS[name].numel


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith("b")])
def test_the_papers_presets_are_named_after_their_layers(name: str) -> None:
    preset = PRESETS[name]
    billions = float(name.removeprefix("gpt-").removesuffix("b"))
    assert 12 * preset.layers * preset.hidden**2 / 1e9 == pytest.approx(billions, rel=0.04)
    # PatrickStar's models have 16 heads. Wider ones have heads of 128, because fused attention supports up to 256.
    assert preset.heads == (16 if preset.hidden < 8192 else preset.hidden // 128)


@pytest.mark.parametrize("name", EXPERT_PRESETS)
def test_a_preset_with_experts_has_experts_and_plans(name: str) -> None:
    with torch.device("meta"):
        model = built(name)
    millions = int(name.removeprefix("mixtral-").removesuffix("m"))
    assert round(numel(model) / 1e6) == millions
    assert model.config.num_local_experts == EXPERT_PRESETS[name].experts
    assert model.tp_plan and model.ep_plan


QUICK = ("llama-3-8b", "qwen3-0.6b")
OPEN = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in OPEN_MODELS]


@pytest.mark.parametrize("name", OPEN)
def test_an_open_model_has_its_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        assert numel(built(name)) == OPEN_MODELS[name].params


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Llama-3.1-8B", "llama-3-8b"),
        ("llama2-7b-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("qwen-3-8b", "qwen3-8b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
    ],
)
def test_an_open_model_is_found_as_people_write_it(written: str, name: str) -> None:
    assert find_open_model(written) is OPEN_MODELS[name]


def test_a_model_that_is_unknown_is_not_another() -> None:
    assert find_open_model("llama-3-9b") is None
    with pytest.raises(ModelError, match=r"there is no model 'Llama-3-9B'.*did you mean llama-3-8b\?"):
        find_model("Llama-3-9B")


@pytest.mark.parametrize("name", T5_PRESETS)
def test_a_t5_preset_has_the_parameters_it_says(name: str) -> None:
    with torch.device("meta"):
        assert numel(transformers.T5ForConditionalGeneration(T5_PRESETS[name].config())) == T5_PRESETS[name].numel


@pytest.mark.parametrize("name", ["t5-27b", "t5-moe-1.2t", "gpt-moe-52b"])
def test_t5s_and_models_with_experts_are_presets_for_plans_only(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name} is a preset of `patrickstar plan` only"):
        find_model(name)


def test_a_t5_with_experts_has_the_parameters_of_a_switch_transformer() -> None:
    shape = T5(layers=4, hidden=64, heads=4, ffn=96, vocab=100, experts=Experts(6, every=2))
    config = transformers.SwitchTransformersConfig(
        **dict(vocab_size=100, d_model=64, d_kv=16, d_ff=96, num_heads=4, num_layers=4, num_decoder_layers=4),
        **dict(num_sparse_encoder_layers=2, num_sparse_decoder_layers=2, num_experts=6),
    )
    with torch.device("meta"):
        assert numel(transformers.SwitchTransformersForConditionalGeneration(config)) == shape.numel


def test_activation_checkpointing_is_switched_on() -> None:
    for wanted in (False, True):
        build, _ = find_model("gpt-1m").open(activation_checkpointing=wanted)
        assert callable(build)
        model = build()
        assert model.training
        assert {block.gradient_checkpointing for block in model.transformer.h} == {wanted}


def test_the_vocabulary_can_be_replaced() -> None:
    source = find_model("gpt-1m", vocab_size=500)
    assert source.vocabulary.size == source.config.vocab_size == 500
    assert find_model("gpt-1m").vocabulary.size == 1024
    assert source.max_sequence == 1024


def test_a_misspelt_preset_is_named_with_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"'gpt-40n'.*did you mean gpt-40m\?"):
        find_model("gpt-40n")
    with pytest.raises(ModelError, match=r"'!!'.*the presets are gpt-1m"):
        find_model("!!")


def test_a_config_file_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps({"model_type": "llama", **LLAMA}))
    model = built(str(file), vocab_size=400)
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert model.model.embed_tokens.weight.shape == (400, 32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read"),
        ("[]", "model_type None"),
        ('{"model_type": "no-such-model"}', "'no-such-model', which is unknown"),
        ('{"model_type": "gpt2", "n_layer": "many"}', "is not valid"),
        ('{"model_type": "vit"}', "no causal language model"),
    ],
)
def test_a_bad_config_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        find_model(str(file))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("build", [gpt2, partial(llama, False), partial(llama, True)], ids=["gpt2", "llama", "tied"])
def test_a_folder(tmp_path: Path, build: Any, shards: int) -> None:
    model = build()
    assert_loads(save(tmp_path / "m", model, dict(model.named_parameters()), shards), model)


def test_a_file_written_without_the_head_has_no_prefix(tmp_path: Path) -> None:
    model = gpt2()
    assert_loads(save(tmp_path / "m", model, dict(model.transformer.named_parameters())), model)


def test_a_tied_weight_is_found_under_its_other_name(tmp_path: Path) -> None:
    model = llama(tied=True)
    tensors = dict(model.named_parameters())
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    assert_loads(save(tmp_path / "m", model, tensors), model)


def test_a_buffer_that_the_model_computes_is_passed_over(tmp_path: Path) -> None:
    model = llama(tied=True)
    name, buffer = next(iter(model.named_buffers()))
    assert_loads(save(tmp_path / "m", model, {**dict(model.named_parameters()), name: buffer + 1}), model)


def test_a_folders_tokenizer_and_end_marker_are_used(tmp_path: Path) -> None:
    model = gpt2()
    model.config.eos_token_id = [7, 8]
    folder = save(tmp_path / "m", model, dict(model.named_parameters()))
    assert find_model(str(folder)).vocabulary.file is None
    (folder / "tokenizer.json").write_text("{}")
    vocabulary = find_model(str(folder)).vocabulary
    assert (vocabulary.file, vocabulary.end_id, vocabulary.size) == (folder / "tokenizer.json", 7, 300)
    with pytest.raises(ConfigError, match="has a vocabulary of 300"):
        find_model(str(folder), vocab_size=400)


@pytest.mark.parametrize(
    ("removed", "changed", "message"),
    [
        (
            ["transformer.h.1.ln_1.bias", "transformer.ln_f.bias"],
            {},
            r"missing: transformer\.h\.1\.ln_1\.bias, transformer\.ln_f\.bias$",
        ),
        (
            [],
            {"transformer.wpe.weight": torch.zeros(65, 32)},
            r"transformer\.wpe\.weight \(F32, \[65, 32\]\) for .* \[64, 32\]",
        ),
    ],
    ids=["missing", "of another shape"],
)
def test_weights_that_do_not_match_are_named(
    tmp_path: Path, removed: list[str], changed: dict[str, torch.Tensor], message: str
) -> None:
    model = gpt2()
    tensors = {name: value for name, value in model.named_parameters() if name not in removed} | changed
    with pytest.raises(ModelError, match=message):
        find_model(str(save(tmp_path / "m", model, tensors))).open(activation_checkpointing=False)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has neither model.safetensors nor"),
        ({"pytorch_model.bin": b"pickle"}, "can run code"),
        ({"model.safetensors": b"broken"}, "is truncated"),
        ({"model.safetensors.index.json": b"{}"}, "weight_map"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "shard.safetensors"}}'},
            "'shard.safetensors', which does not exist",
        ),
    ],
)
def test_bad_weights_are_named(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    (tmp_path / "config.json").write_text(gpt2().config.to_json_string())
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        find_model(str(tmp_path)).open(activation_checkpointing=False)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        find_model(str(tmp_path))
