"""Named GPT shapes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GPT2Config

# GPT-2's vocabulary and context length, which the paper's models use too.
_GPT2_VOCAB = 50257
_GPT2_POSITIONS = 1024


@dataclass(frozen=True)
class Preset:
    """Shape of a GPT-2-like model."""

    layers: int
    hidden: int
    heads: int
    vocab_size: int = _GPT2_VOCAB

    def numel(self) -> int:
        """Return the number of trainable elements, with the head tied to the embedding."""
        matrices = 12 * self.hidden**2
        biases_and_norms = 13 * self.hidden
        embeddings = (self.vocab_size + _GPT2_POSITIONS) * self.hidden
        return self.layers * (matrices + biases_and_norms) + embeddings + 2 * self.hidden

    def config(self) -> "GPT2Config":
        """Return the Hugging Face configuration, without dropout because training sees each text once."""
        # Imported here because it takes seconds to load, and plans only need the shape.
        from transformers import GPT2Config

        return GPT2Config(
            n_layer=self.layers,
            n_embd=self.hidden,
            n_head=self.heads,
            vocab_size=self.vocab_size,
            n_positions=_GPT2_POSITIONS,
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
    "gpt-1m": Preset(layers=4, hidden=128, heads=4, vocab_size=1024),
    "gpt-10m": Preset(layers=6, hidden=320, heads=5, vocab_size=8192),
    "gpt-40m": Preset(layers=12, hidden=512, heads=8, vocab_size=8192),
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
