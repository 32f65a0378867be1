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
    layer_bytes = gpt.saved_bytes(batch) - SAVED_BYTES_PER_SCORE * gpt.score_numel(batch)
    activations = gpt.checkpoint_bytes(batch) + layer_bytes if checkpointing else gpt.layers * layer_bytes
    return _workload(gpt, batch, checkpointing, activations, gpt.layer_numel)


def t5_workload(t5: T5, batch: int, checkpointing: bool = True) -> Workload:
    """Return the workload of one process for `batch` samples, with fused attention, which saves no scores.

    Tokens are those of one stack: the encoder and the decoder each process as many.
    """
    encoder_bytes, decoder_bytes = t5.saved_bytes(batch)
    activations = (
        t5.checkpoint_bytes(batch) + decoder_bytes if checkpointing else t5.layers * (encoder_bytes + decoder_bytes)
    )
    return _workload(t5, batch, checkpointing, activations, t5.decoder_layer_numel)


def _workload(shape: Gpt | T5, batch: int, checkpointing: bool, activations: int, layer_numel: int) -> Workload:
    """Return the workload with these bytes of activations, and `layer_numel` elements in the largest layer."""
    tokens = batch * shape.sequence
    return Workload(
        params=shape.numel,
        batch=batch,
        tokens=tokens,
        checkpointing=checkpointing,
        operations=shape.operations(tokens, checkpointing),
        matrix_size=min(shape.hidden, tokens),
        non_model_bytes=activations + shape.logit_bytes(batch),
        working_bytes=2 * PARAM_BYTES * layer_numel,
    )
