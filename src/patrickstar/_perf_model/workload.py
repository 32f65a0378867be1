"""Workload of one training step, the input of the performance model, from the analytic costs of a GPT or a T5."""

from collections.abc import Callable
from dataclasses import dataclass

from patrickstar._perf_model.gpt_costs import SAVED_BYTES_PER_SCORE, Gpt
from patrickstar._perf_model.t5_costs import T5

PARAM_BYTES = 2
"""Bytes of a parameter in the compute dtype; its gradient reuses the same memory."""
STATE_BYTES = 12
"""Bytes of a parameter's fp32 master copy and two optimizer moments."""
LOCK_FREE_BYTES = 6
"""Host bytes of a parameter's buffers for lock-free updates: its newest value, and an fp32 sum of gradients."""
UPDATE_BYTES = 2 * PARAM_BYTES + 2 * STATE_BYTES
"""Bytes per parameter that an update reads and writes: gradient, parameter, states."""

HALF, SINGLE = 2, 4
"""Bytes of a 16-bit and of a 32-bit number."""


@dataclass(frozen=True)
class Workload:
    """Workload of one step of one process."""

    params: int
    batch: int
    """Number of sequences."""
    tokens: int
    checkpointing: bool
    """Activations are recomputed in backward."""
    operations: float
    matrix_size: int
    """Typical smallest side of matrix products; larger products are faster."""
    non_model_bytes: int
    """Peak non-model data on the device: saved activations and operator workspace."""
    working_bytes: int
    """Parameters needed on the device at once: those of two layers, one in use and one in transfer."""

    @property
    def fill_share(self) -> float:
        """Fraction of the transfers that cannot overlap with computation: the first and last working sets."""
        return min(1.0, self.working_bytes / (PARAM_BYTES * self.params))


Workloads = Callable[[int, bool], Workload]
"""Function from (sequences per process, checkpointing) to the workload."""


def gpt_workload(gpt: Gpt, batch: int, checkpointing: bool = True) -> Workload:
    """Return the workload of one process for `batch` sequences, with fused attention, which saves no scores."""
    tokens = batch * gpt.sequence
    layer_bytes = gpt.saved_bytes(batch) - SAVED_BYTES_PER_SCORE * gpt.score_numel(batch)
    activations = gpt.checkpoint_bytes(batch) + layer_bytes if checkpointing else gpt.layers * layer_bytes
    return Workload(
        params=gpt.numel,
        batch=batch,
        tokens=tokens,
        checkpointing=checkpointing,
        operations=gpt.operations(tokens, checkpointing),
        matrix_size=min(gpt.hidden, tokens),
        non_model_bytes=activations + gpt.logit_bytes(batch),
        working_bytes=2 * PARAM_BYTES * gpt.layer_numel,
    )


def t5_workload(t5: T5, batch: int, checkpointing: bool = True) -> Workload:
    """Return the workload of one process for `batch` samples, with fused attention, which saves no scores.

    Tokens are those of one stack: the encoder and the decoder each process as many.
    """
    tokens = batch * t5.sequence
    encoder_bytes, decoder_bytes = t5.saved_bytes(batch)
    activations = (
        t5.checkpoint_bytes(batch) + decoder_bytes if checkpointing else t5.layers * (encoder_bytes + decoder_bytes)
    )
    return Workload(
        params=t5.numel,
        batch=batch,
        tokens=tokens,
        checkpointing=checkpointing,
        operations=t5.operations(tokens, checkpointing),
        matrix_size=min(t5.hidden, tokens),
        non_model_bytes=activations + t5.logit_bytes(batch),
        working_bytes=2 * PARAM_BYTES * t5.decoder_layer_numel,
    )
