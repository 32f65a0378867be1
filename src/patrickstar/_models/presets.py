"""Named shapes of GPTs and T5s, also with experts. Only `config` imports transformers, which takes seconds to load."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from patrickstar._perf_model.experts import Experts
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.t5_costs import T5

if TYPE_CHECKING:
    from transformers import GPT2Config, MixtralConfig, SwitchTransformersConfig, T5Config


@dataclass(frozen=True)
class Preset(Gpt):
    """Shape of a GPT-2-like model. The default vocabulary and context length are GPT-2's, as in the paper's models."""

    def config(self) -> "GPT2Config":
        """Return the Hugging Face configuration, without dropout because training sees each text once."""
        from transformers import GPT2Config

        return GPT2Config(
            n_layer=self.layers,
            n_embd=self.hidden,
            n_head=self.heads,
            vocab_size=self.vocab,
            n_positions=self.sequence,
            # GPT-2's function as one operator; the library's default is a chain of operators that each save a tensor.
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            # Vocabularies trained by this package begin with the end marker.
            bos_token_id=0,
            eos_token_id=0,
        )


@dataclass(frozen=True)
class ExpertPreset:
    """Shape of a GPT with experts: Mixtral's layers, where each token passes through two of the experts."""

    layers: int
    hidden: int
    heads: int
    experts: int
    vocab: int
    sequence: int = 1024

    def config(self) -> "MixtralConfig":
        """Return the Hugging Face configuration. Experts are twice as wide as the layer; the loss balances them."""
        from transformers import MixtralConfig

        return MixtralConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            num_local_experts=self.experts,
            vocab_size=self.vocab,
            max_position_embeddings=self.sequence,
            output_router_logits=True,
            tie_word_embeddings=True,
            bos_token_id=0,  # as for GPTs
            eos_token_id=0,
        )


@dataclass(frozen=True)
class T5Preset(T5):
    """Shape of a T5 1.0 model. The default vocabulary is T5's."""

    def config(self) -> "T5Config":
        """Return the Hugging Face configuration, without dropout."""
        from transformers import T5Config

        config = T5Config(
            num_layers=self.layers,
            d_model=self.hidden,
            num_heads=self.heads,
            d_kv=self.hidden // self.heads,
            d_ff=self.ffn,
            vocab_size=self.vocab,
            dropout_rate=0.0,
        )
        # Labels are shifted behind a start token, the padding token 0; the constructor has no argument for it.
        config.update({"decoder_start_token_id": 0})
        return config


@dataclass(frozen=True)
class SwitchPreset:
    """Shape of a Switch Transformer: a T5 with experts in every second layer; a token passes through one of them."""

    layers: int
    hidden: int
    heads: int
    experts: int
    vocab: int

    def config(self) -> "SwitchTransformersConfig":
        """Return the Hugging Face configuration, without dropout. Experts are four times as wide as the layer."""
        from transformers import SwitchTransformersConfig

        config = SwitchTransformersConfig(
            vocab_size=self.vocab,
            d_model=self.hidden,
            d_kv=self.hidden // self.heads,
            d_ff=4 * self.hidden,
            num_layers=self.layers,
            num_decoder_layers=self.layers,
            num_heads=self.heads,
            num_experts=self.experts,
            num_sparse_encoder_layers=self.layers // 2,
            num_sparse_decoder_layers=self.layers // 2,
            router_jitter_noise=0.0,
            dropout_rate=0.0,
        )
        # As for T5; and the loss balances the experts.
        config.update({"decoder_start_token_id": 0, "output_router_logits": True})
        return config


PRESETS = {
    "gpt-1m": Preset(layers=4, hidden=128, heads=4, vocab=1024),
    "gpt-10m": Preset(layers=6, hidden=320, heads=5, vocab=8192),
    "gpt-40m": Preset(layers=12, hidden=512, heads=8, vocab=8192),
    "gpt2-124m": Preset(layers=12, hidden=768, heads=12),
    # PatrickStar, Tables 1 and 2. The names count the layers' matrices, 12 x layers x hidden^2, without embeddings.
    # The shape of the 0.7B model is derived from that: 24 x 1536, with 16 heads as the others, has 0.68e9 elements.
    "gpt-0.7b": Preset(layers=24, hidden=1536, heads=16),
    "gpt-1b": Preset(layers=20, hidden=2048, heads=16),
    "gpt-2b": Preset(layers=40, hidden=2048, heads=16),
    "gpt-4b": Preset(layers=64, hidden=2304, heads=16),
    "gpt-6b": Preset(layers=53, hidden=3072, heads=16),
    "gpt-8b": Preset(layers=72, hidden=3072, heads=16),
    "gpt-10b": Preset(layers=50, hidden=4096, heads=16),
    "gpt-12b": Preset(layers=60, hidden=4096, heads=16),
    # Angel-PTM (arXiv 2303.02868), Table 4, as printed. It contradicts the name of 28B: 26 layers have 20.9e9 elements,
    # 35 would have 28.2e9. Its 13B and 30B can't be built: 40 and 36 heads do not divide their widths, 5140 and 8192.
    "gpt-1.7b": Preset(layers=24, hidden=2304, heads=24),
    "gpt-28b": Preset(layers=26, hidden=8192, heads=128),
    "gpt-55b": Preset(layers=68, hidden=8192, heads=128),
    "gpt-120b": Preset(layers=64, hidden=12288, heads=96),
    "gpt-175b-wide": Preset(layers=70, hidden=14336, heads=112),
    # Brown et al. 2020, table 2.1: GPT-3. Angel-PTM's GPT3-175B is the wide one.
    "gpt-175b": Preset(layers=96, hidden=12288, heads=96),
}
"""Causal language models, to plan and to train."""

EXPERT_PRESETS = {
    "mixtral-4m": ExpertPreset(layers=4, hidden=128, heads=4, experts=8, vocab=1024),
}
"""Causal language models with experts, to train in any division into tensors and experts; plans trace them."""

T5_PRESETS = {
    # Raffel et al. 2020, section 3.7: small, base and large.
    "t5-60m": T5Preset(layers=6, hidden=512, heads=8, ffn=2048),
    "t5-220m": T5Preset(layers=12, hidden=768, heads=12, ffn=3072),
    "t5-770m": T5Preset(layers=24, hidden=1024, heads=16, ffn=4096),
    # Angel-PTM, Table 4, as printed, for each stack. It contradicts two names: a layer of both has 28 x hidden^2
    # elements, so that 28 and 60 layers have 13.2e9 and 28.2e9; 57 and 123 would have 26.8e9 and 57.8e9.
    "t5-1.4b": T5Preset(layers=16, hidden=1024, heads=16, ffn=16384),
    "t5-27b": T5Preset(layers=28, hidden=4096, heads=64, ffn=16384),
    "t5-58b": T5Preset(layers=60, hidden=4096, heads=64, ffn=16384),
}
"""Models with encoder and decoder, to plan and to train: `layers` of each stack."""

SWITCH_PRESETS = {
    "switch-3m": SwitchPreset(layers=2, hidden=128, heads=4, experts=8, vocab=1024),
}
"""Models with encoder, decoder and experts, to train only: the tokens of an expert are known in a step alone."""

TRAINED_PRESETS: dict[str, Preset | ExpertPreset | T5Preset | SwitchPreset] = {
    **PRESETS,
    **EXPERT_PRESETS,
    **T5_PRESETS,
    **SWITCH_PRESETS,
}

MOE_PRESETS: dict[str, Gpt | T5] = {
    # DeepSpeed-MoE (arXiv 2201.05596): 1.3B+MoE-128, with 128 experts in every second layer and top-1 routing.
    "gpt-moe-52b": Gpt(layers=24, hidden=2048, heads=16, experts=Experts(128, every=2)),
    # Angel-PTM, Table 4, as printed. The paper does not say which layers have experts: with every second one and top-1
    # routing, as in the Switch Transformer, the model has the named size.
    "t5-moe-1.2t": T5(layers=16, hidden=1024, heads=16, ffn=16384, experts=Experts(2304, every=2)),
}
"""Models with experts, to plan only."""
