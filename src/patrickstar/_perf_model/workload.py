"""What a step has to do, as far as an estimate needs to know it."""

from collections.abc import Callable
from dataclasses import dataclass

from patrickstar._perf_model.gpt_costs import SAVED_BYTES_PER_SCORE, Gpt

PARAM_BYTES = 2
"""Of a parameter in the dtype that operators compute in, and of its gradient, which takes its place."""
STATE_BYTES = 12
"""Of a parameter's master and two moments."""
UPDATE_BYTES = 2 * PARAM_BYTES + 2 * STATE_BYTES
"""What an update on the host reads and writes: gradient, parameter, states."""


@dataclass(frozen=True)
class Workload:
    """One step of one process."""

    params: int
    batch: int
    """Sequences."""
    tokens: int
    checkpointing: bool
    """Whether activations are computed again in backward."""
    operations: float
    matrix_size: int
    """The smallest side of most matrix products: the larger, the faster they are."""
    non_model_bytes: int
    """The most non-model data on the device: activations kept for backward, and what operators take."""
    working_bytes: int
    """Parameters that have to be on the device at once: those of two layers, one in use and one on its way."""

    @property
    def fill_share(self) -> float:
        """The part of all movement that nothing hides: what is needed at once, when it is the first or the last."""
        return min(1.0, self.working_bytes / (PARAM_BYTES * self.params))


Workloads = Callable[[int, bool], Workload]
"""From sequences per process, and whether activations are computed again."""


def gpt_workload(gpt: Gpt, batch: int, checkpointing: bool = True) -> Workload:
    """A step of one process over `batch` sequences. Attention is fused: it keeps no scores."""
    tokens = batch * gpt.sequence
    layer = gpt.saved_bytes(batch) - SAVED_BYTES_PER_SCORE * gpt.score_numel(batch)
    kept = gpt.checkpoint_bytes(batch) + layer if checkpointing else gpt.layers * layer
    return Workload(
        params=gpt.numel,
        batch=batch,
        tokens=tokens,
        checkpointing=checkpointing,
        operations=gpt.operations(tokens, checkpointing),
        matrix_size=min(gpt.hidden, tokens),
        non_model_bytes=kept + gpt.logit_bytes(batch),
        working_bytes=2 * PARAM_BYTES * gpt.layer_numel,
    )
