"""What the bytes decide: which optimizer chunks live on the device, and where an embedding runs (§8.2).

Parameters come before optimizer states: a byte of 16-bit parameters kept on the device saves more traffic than a
byte of optimizer states does.
"""

from collections.abc import Sequence

from patrickstar.layout.mapping import ChunkSpec

WARM_UP_PERCENT = 80
"""The share of the device budget that the warm-up may fill, since what an operator will allocate is not yet known
(the paper's own figure)."""


def update_workspace_bytes(chunk: ChunkSpec, largest_param_numel: int, itemsize: int) -> int:
    """Temporaries of updating a chunk: the gradient of its largest parameter in the master dtype."""
    return min(chunk.numel, largest_param_numel) * itemsize if chunk.scheme.trained else 0


def margin_chunks(
    chunks: Sequence[ChunkSpec], device_budget_bytes: int, peak_non_model_bytes: int, workspace_bytes: int
) -> list[int]:
    """The chunk indices whose optimizer chunks live on the device, in list order.

    The margin space is what the budget leaves at the peak of non-model data once all of `param16` is there. Where not
    even that fits there is no margin: every byte serves parameters.
    """
    param16 = sum(chunk.compute_bytes for chunk in chunks)
    margin = device_budget_bytes - peak_non_model_bytes - workspace_bytes - param16
    placed = []
    for chunk in chunks:
        if chunk.scheme.trained and chunk.optimizer_bytes <= margin:
            placed.append(chunk.index)
            margin -= chunk.optimizer_bytes
    return placed


def embedding_runs_on_host(chunk_bytes_moved: int, activation_bytes: int) -> bool:
    """Whether an embedding moves fewer bytes when its lookup runs where its weight lies, on the host.

    `chunk_bytes_moved`: what the traced iteration moved of its chunk, both directions. `activation_bytes`: its output;
    the gradient of the output goes the other way, hence twice.
    """
    return 2 * activation_bytes < chunk_bytes_moved
