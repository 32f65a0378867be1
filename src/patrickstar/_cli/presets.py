"""Named GPT shapes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from patrickstar._perf_model.gpt_costs import Gpt

if TYPE_CHECKING:
    from transformers import GPT2Config


@dataclass(frozen=True)
class Preset(Gpt):
    """Shape of a GPT-2-like model. The default vocabulary and context length are GPT-2's, as in the paper's models."""

    def config(self) -> "GPT2Config":
        """Return the Hugging Face configuration, without dropout because training sees each text once."""
        # Imported here because it takes seconds to load, and plans only need the shape.
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
}
