"""Shapes of well-known open models by name, to plan with and to train from random weights."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patrickstar._perf_model.decoder_costs import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class OpenModel:
    """Shape of a decoder, as in its published configuration.

    Attributes:
        kind: Type of configuration in transformers.
        params: Published number of parameters, which a test compares.
        options: Further fields of the configuration.
    """

    kind: str
    params: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int
    options: dict[str, Any] = field(default_factory=dict)

    def decoder(self) -> Decoder:
        """Return the shape, whose costs are computed by formulas."""
        hidden, heads, kv_heads = self.hidden, self.heads, self.kv_heads
        head_dim = self.options.get("head_dim", hidden // heads)
        queries, keys, ffn = heads * head_dim, kv_heads * head_dim, self.ffn
        experts = self.options.get("num_local_experts", 0)
        fused = self.kind == "phi3"
        attention = [(hidden, queries + 2 * keys)] if fused else [(hidden, queries), (hidden, keys), (hidden, keys)]
        gates = [(hidden, 2 * ffn)] if fused else [(hidden, ffn), (hidden, ffn)]
        network = [] if experts else [*gates, (ffn, hidden)]
        return Decoder(
            layers=self.layers,
            hidden=hidden,
            ffn=ffn,
            vocab=self.vocab,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            linears=(*attention, (queries, hidden), *network),
            biases=queries + 2 * keys if self.kind == "qwen2" else 0,
            norms=4 if self.kind == "gemma2" else 2,
            head_norms=2 * head_dim if self.kind == "qwen3" else 0,
            tied=self.options.get("tie_word_embeddings", False),
            capped=self.kind == "gemma2",
            experts=experts or 1,
            top_k=self.options.get("num_experts_per_tok", 1),
            expert_numel=3 * hidden * ffn if experts else 0,
        )

    def config(self) -> "PreTrainedConfig":
        """Return the Hugging Face configuration."""
        # Imported here because it takes seconds to load.
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.kind,
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.ffn,
            vocab_size=self.vocab,
            max_position_embeddings=self.positions,
            # Vocabularies trained by this package begin with the end marker.
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
            **self.options,
        )


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
WIDE = {"head_dim": 128}
EXPERTS_OF_8 = UNTIED | {"num_local_experts": 8, "num_experts_per_tok": 2}

OPEN_MODELS = {
    "llama-2-7b": OpenModel("llama", 6_738_415_616, 32, 4096, 32, 32, 11008, 32000, 4096, UNTIED),
    "llama-2-13b": OpenModel("llama", 13_015_864_320, 40, 5120, 40, 40, 13824, 32000, 4096, UNTIED),
    "llama-2-70b": OpenModel("llama", 68_976_648_192, 80, 8192, 64, 8, 28672, 32000, 4096, UNTIED),
    "llama-3-8b": OpenModel("llama", 8_030_261_248, 32, 4096, 32, 8, 14336, 128256, 8192, UNTIED),
    "llama-3-70b": OpenModel("llama", 70_553_706_496, 80, 8192, 64, 8, 28672, 128256, 8192, UNTIED),
    "llama-3.2-1b": OpenModel("llama", 1_235_814_400, 16, 2048, 32, 8, 8192, 128256, 131072, TIED | {"head_dim": 64}),
    "llama-3.2-3b": OpenModel("llama", 3_212_749_824, 28, 3072, 24, 8, 8192, 128256, 131072, TIED | WIDE),
    "mistral-7b": OpenModel("mistral", 7_241_732_096, 32, 4096, 32, 8, 14336, 32000, 32768, UNTIED),
    "mixtral-8x7b": OpenModel("mixtral", 46_702_792_704, 32, 4096, 32, 8, 14336, 32000, 32768, EXPERTS_OF_8),
    "mixtral-8x22b": OpenModel("mixtral", 140_630_071_296, 56, 6144, 48, 8, 16384, 32768, 65536, EXPERTS_OF_8),
    "qwen2.5-0.5b": OpenModel("qwen2", 494_032_768, 24, 896, 14, 2, 4864, 151936, 32768, TIED),
    "qwen2.5-1.5b": OpenModel("qwen2", 1_543_714_304, 28, 1536, 12, 2, 8960, 151936, 32768, TIED),
    "qwen2.5-3b": OpenModel("qwen2", 3_085_938_688, 36, 2048, 16, 2, 11008, 151936, 32768, TIED),
    "qwen2.5-7b": OpenModel("qwen2", 7_615_616_512, 28, 3584, 28, 4, 18944, 152064, 32768, UNTIED),
    "qwen2.5-14b": OpenModel("qwen2", 14_770_033_664, 48, 5120, 40, 8, 13824, 152064, 32768, UNTIED),
    "qwen2.5-32b": OpenModel("qwen2", 32_763_876_352, 64, 5120, 40, 8, 27648, 152064, 32768, UNTIED),
    "qwen2.5-72b": OpenModel("qwen2", 72_706_203_648, 80, 8192, 64, 8, 29568, 152064, 32768, UNTIED),
    "qwen3-0.6b": OpenModel("qwen3", 596_049_920, 28, 1024, 16, 8, 3072, 151936, 40960, TIED | WIDE),
    "qwen3-1.7b": OpenModel("qwen3", 1_720_574_976, 28, 2048, 16, 8, 6144, 151936, 40960, TIED | WIDE),
    "qwen3-4b": OpenModel("qwen3", 4_022_468_096, 36, 2560, 32, 8, 9728, 151936, 40960, TIED | WIDE),
    "qwen3-8b": OpenModel("qwen3", 8_190_735_360, 36, 4096, 32, 8, 12288, 151936, 40960, UNTIED | WIDE),
    "qwen3-14b": OpenModel("qwen3", 14_768_307_200, 40, 5120, 40, 8, 17408, 151936, 40960, UNTIED | WIDE),
    "qwen3-32b": OpenModel("qwen3", 32_762_123_264, 64, 5120, 64, 8, 25600, 151936, 40960, UNTIED | WIDE),
    "gemma-2-2b": OpenModel("gemma2", 2_614_341_888, 26, 2304, 8, 4, 9216, 256000, 8192, TIED | {"head_dim": 256}),
    "gemma-2-9b": OpenModel("gemma2", 9_241_705_984, 42, 3584, 16, 8, 14336, 256000, 8192, TIED | {"head_dim": 256}),
    "gemma-2-27b": OpenModel("gemma2", 27_227_128_320, 46, 4608, 32, 16, 36864, 256000, 8192, TIED | WIDE),
    "phi-3-mini": OpenModel("phi3", 3_821_079_552, 32, 3072, 32, 32, 8192, 32064, 4096, UNTIED),
}
"""Causal language models of the open families, by their usual names in lower case."""

ALIASES = {"llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b", "llama-3.3-70b": "llama-3-70b"}
"""Names of models that have the shape of another."""


def find_open_model(name: str) -> OpenModel | None:
    """Return the model of a name as people write it, such as `meta-llama/Meta-Llama-3-8B-Instruct`; None if unknown."""
    plain = name.lower().rpartition("/")[2].replace("_", "-").removeprefix("meta-")
    plain = re.sub(r"-(instruct|it|hf|base|chat|v0\.\d|4k-instruct|pt)\b", "", plain)
    plain = re.sub(r"^(llama|qwen|gemma|phi|mistral|mixtral)-?(\d)", _with_dash, plain)
    return OPEN_MODELS.get(ALIASES.get(plain, plain))


def _with_dash(match: "re.Match[str]") -> str:
    return f"{match[1]}{'' if match[1] == 'qwen' else '-'}{match[2]}"
