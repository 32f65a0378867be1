"""Tiny models of transformers and inputs for them."""

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from toys import mean_square, update
from transformers import PreTrainedModel

import patrickstar as ps
from patrickstar.integrations.transformers._folder_weights import FolderWeights
from patrickstar.integrations.transformers._model_builder import build_model, parameters_on_meta, read_config

SIZES: dict[str, Any] = dict(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2)
SIZES |= dict(vocab_size=96, max_position_embeddings=64)
EXPERTS = {"num_experts_per_tok": 2, "num_key_value_heads": 2}
VOCABULARY = SIZES["vocab_size"]
CAUSAL = transformers.AutoModelForCausalLM
MASKED = transformers.AutoModelForMaskedLM
SEQ2SEQ = transformers.AutoModelForSeq2SeqLM


def gpt2_config() -> transformers.GPT2Config:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY}
    return transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)


def gpt2() -> PreTrainedModel:
    return transformers.GPT2LMHeadModel(gpt2_config())


def llama(kind: Any = transformers.LlamaForCausalLM, **options: Any) -> PreTrainedModel:
    return kind(transformers.LlamaConfig(**SIZES | options))


def mixtral() -> PreTrainedModel:
    # More than ten experts: their order must be numeric, not alphabetic.
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=11))


def nomic_bert() -> PreTrainedModel:
    model: PreTrainedModel = MASKED.from_config(transformers.CONFIG_MAPPING["nomic_bert"](**SIZES))
    return model


def switch(capacity: int, **options: Any) -> PreTrainedModel:
    """Return a T5 with experts that take up to `capacity` tokens each."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    experts = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    fixed = {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.SwitchTransformersConfig(
        **{"vocab_size": VOCABULARY} | sizes | experts | fixed | options, expert_capacity=capacity
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


QWEN2_MOE = SIZES | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], Any]] = {
    "gpt2": (gpt2, CAUSAL),
    "llama": (llama, CAUSAL),
    "llama tied": (lambda: llama(tie_word_embeddings=True), CAUSAL),
    "mixtral": (mixtral, CAUSAL),
    "qwen2_moe": (lambda: CAUSAL.from_config(transformers.Qwen2MoeConfig(**QWEN2_MOE)), CAUSAL),
    "bert": (lambda: MASKED.from_config(transformers.BertConfig(**SIZES)), MASKED),
    "t5": (lambda: SEQ2SEQ.from_config(transformers.T5Config(**T5, decoder_start_token_id=0)), SEQ2SEQ),
    "a class of its own": (gpt2, transformers.GPT2LMHeadModel),
}


def plain(name: str, seed: int = 0) -> tuple[PreTrainedModel, Any]:
    """Return a model with random weights, and the class to load it with."""
    build, model_class = MODELS[name]
    torch.manual_seed(seed)
    return build().eval(), model_class


def batch(model: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(seed))
    more = {"decoder_input_ids": ids} if getattr(model.config, "is_encoder_decoder", False) else {}
    return {"input_ids": ids, **more}


def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        values: torch.Tensor = model(**inputs).logits
    return values


def step(engine: ps.Engine, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    """Run one update, so that master parameters differ from their rounded copies."""
    update(engine, mean_square(engine(**batch(engine.module, seed)).logits))


WORDS = ["<pad>", "<eos>", "<unk>", *string.ascii_lowercase, *string.digits]
OF_WORDS = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1}
"""Options of models for the tokenizer of `letters`."""


def letters() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with a token per letter or digit."""
    tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def engine_of(folder: Path, config: ps.Config, model_class: Any = CAUSAL, **options: Any) -> ps.Engine:
    """Load like `from_pretrained`, with the engine's options for tests."""
    with parameters_on_meta():
        model = build_model(read_config(folder / "config.json"), model_class)
    return ps.Engine(model, config, FolderWeights(folder, model), **options)


def small_chunks(precision: str = "fp32", **options: Any) -> ps.Config:
    return ps.Config(device="cpu", precision=precision, chunk_size=4096, optimizer=ps.AdamW(lr=1e-2), **options)
