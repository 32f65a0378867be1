"""The model to train: presets, configuration files and local folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integrations.tiny import SIZES, VOCABULARY, gpt2, llama
from torch import nn

from patrickstar._models.model_source import find_model
from patrickstar._models.open_models import OPEN_MODELS, find_open_model
from patrickstar._models.presets import EXPERT_PRESETS, PRESETS, T5_PRESETS
from patrickstar._perf_model.experts import Experts
from patrickstar._perf_model.t5_costs import T5
from patrickstar.errors import ConfigError, ModelError


def built(name: str, **options: Any) -> Any:
    """Build a model that is not a folder."""
    build, weights = find_model(name, **options).open()
    assert callable(build) and weights is None
    return build()


def numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", ["0.7", "1", "2", "4", "6", "8", "10", "12"])
def test_patrickstars_presets_are_named_after_their_layers(size: str) -> None:
    preset = PRESETS[f"gpt-{size}b"]
    assert 12 * preset.layers * preset.hidden**2 / 1e9 == pytest.approx(float(size), rel=0.04)
    assert preset.heads == 16


@pytest.mark.parametrize(
    ("name", "printed", "billions"),
    [
        ("gpt-1.7b", (24, 24, 2304, 9216), 1.53),
        ("gpt-28b", (26, 128, 8192, 32768), 20.94),  # the table contradicts the name: 35 layers would have 28
        ("gpt-55b", (68, 128, 8192, 32768), 54.76),
        ("gpt-120b", (64, 96, 12288, 49152), 115.96),
        ("gpt-175b-wide", (70, 112, 14336, 57344), 172.64),
    ],
)
def test_angel_ptms_presets_are_as_its_table_4_prints_them(name: str, printed: tuple, billions: float) -> None:
    preset = PRESETS[name]
    assert (preset.layers, preset.heads, preset.hidden, preset.feed_forward.ffn) == printed
    assert preset.layers * preset.layer_numel / 1e9 == pytest.approx(billions, rel=0.001)


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


NUMEL = {name: preset.numel for name, preset in PRESETS.items()}
NUMEL |= {name: model.params for name, model in OPEN_MODELS.items()}


@pytest.mark.parametrize("name", [*PRESETS, *OPEN])
def test_a_model_has_the_parameters_it_says_or_that_were_published(name: str) -> None:
    with torch.device("meta"):
        assert numel(built(name)) == NUMEL[name]


@pytest.mark.parametrize("name", T5_PRESETS)
def test_a_t5_preset_has_the_parameters_it_says(name: str) -> None:
    with torch.device("meta"):
        assert numel(transformers.T5ForConditionalGeneration(T5_PRESETS[name].config())) == T5_PRESETS[name].numel


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Llama-3-9B", r"there is no model 'Llama-3-9B'.*did you mean llama-3-8b\?"),
        ("gpt-40n", r"'gpt-40n'.*did you mean gpt-40m\?"),
        ("!!", r"'!!'.*the presets are gpt-1m"),
        *((name, f"{name} is a preset of `patrickstar plan` only") for name in ("t5-moe-1.2t", "gpt-moe-52b")),
    ],
)
def test_a_model_that_is_unknown_or_for_plans_only_is_named(name: str, message: str) -> None:
    assert find_open_model(name) is None
    with pytest.raises(ModelError, match=message):
        find_model(name)


def test_a_t5_with_experts_has_the_parameters_of_a_switch_transformer() -> None:
    shape = T5(layers=4, hidden=64, heads=4, ffn=96, vocab=100, experts=Experts(6, every=2))
    config = transformers.SwitchTransformersConfig(
        **dict(vocab_size=100, d_model=64, d_kv=16, d_ff=96, num_heads=4, num_layers=4, num_decoder_layers=4),
        **dict(num_sparse_encoder_layers=2, num_sparse_decoder_layers=2, num_experts=6),
    )
    with torch.device("meta"):
        assert numel(transformers.SwitchTransformersForConditionalGeneration(config)) == shape.numel


def test_the_vocabulary_can_be_replaced() -> None:
    source = find_model("gpt-1m", vocab_size=500)
    assert source.vocabulary.size == source.config.vocab_size == 500
    assert find_model("gpt-1m").vocabulary.size == 1024
    assert source.max_sequence == 1024


def test_a_config_file_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps({"model_type": "llama", **SIZES}))
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
        ('{"model_type": "vit"}', "no language model"),
    ],
)
def test_a_bad_config_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        find_model(str(file))
    assert str(file) in str(caught.value)


def test_a_folder_gives_its_model_and_its_weights(tmp_path: Path) -> None:
    expected = llama(tie_word_embeddings=True)
    expected.save_pretrained(tmp_path)
    model, weights = find_model(str(tmp_path)).open()
    assert isinstance(model, nn.Module) and weights is not None
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(torch.equal(weights(name), value) for name, value in expected.named_parameters())


def test_a_folders_configuration_tokenizer_and_end_marker_are_used(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        find_model(str(tmp_path))
    config = gpt2().config.to_dict() | {"eos_token_id": [7, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(str(tmp_path)).vocabulary.file is None
    (tmp_path / "tokenizer.json").write_text("{}")
    vocabulary = find_model(str(tmp_path)).vocabulary
    assert (vocabulary.file, vocabulary.end_id, vocabulary.size) == (tmp_path / "tokenizer.json", 7, VOCABULARY)
    with pytest.raises(ConfigError, match=f"has a vocabulary of {VOCABULARY}"):
        find_model(str(tmp_path), vocab_size=400)
