"""Counts that only the papers' tables need: parameters by tensor, operations, saved attention scores."""

from patrickstar._perf_model.gpt_costs import SAVED_BYTES_PER_HIDDEN, Gpt
from patrickstar._perf_model.t5_costs import POSITION_BUCKETS, T5

PAPER_OPERATIONS = 8
"""Operations per parameter and token in the paper's count: two forward, two for recomputation, four backward."""
SAVED_BYTES_PER_SCORE = 5
"""Bytes that one layer saves for backward per attention score, of which there are heads x sequence per token
(Korthikanti et al. 2022, equation 1)."""


def embedding_numel(shape: Gpt | T5) -> int:
    """Return the number of embedding parameters: tokens, and positions or the biases of relative ones."""
    positions = 2 * POSITION_BUCKETS * shape.heads if isinstance(shape, T5) else shape.sequence * shape.hidden
    return shape.vocab * shape.hidden + positions


def layer_tensors(gpt: Gpt) -> tuple[int, ...]:
    """Return the number of elements of each parameter of one layer, in creation order."""
    hidden = gpt.hidden
    square, attention, norm = hidden**2, (hidden**2, hidden) * 4, (hidden, hidden)
    return (*attention, *norm, 4 * square, 4 * hidden, 4 * square, hidden, *norm)


def paper_operations(gpt: Gpt, tokens: int) -> int:
    """Return the operations of a step with recomputation by the paper's count: 8 per parameter and token."""
    return PAPER_OPERATIONS * gpt.numel * tokens


def score_numel(gpt: Gpt, batch: int) -> int:
    """Return the number of attention scores of one layer."""
    return batch * gpt.heads * gpt.sequence**2


def saved_bytes(gpt: Gpt, batch: int) -> int:
    """Return the bytes that one layer saves for backward if attention saves its scores."""
    hidden = SAVED_BYTES_PER_HIDDEN * batch * gpt.sequence * gpt.hidden
    return hidden + SAVED_BYTES_PER_SCORE * score_numel(gpt, batch)


def checkpoint_bytes(gpt: Gpt, batch: int, layers: int) -> int:
    """Return the bytes of the 16-bit checkpointed inputs of `layers` layers."""
    return gpt.checkpoint_bytes(batch) // gpt.layers * layers
