"""Parameters whose update has failed."""

from collections.abc import Collection

from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam


def give_up(data: LocalShards, failed: Collection[ManagedParam], error: BaseException) -> None:
    """Reset the parameters of a failed update to the rounded masters, updated or not, and name them in the error.

    After a loss of chunk data nothing is reset: the engine will close, and read back what it can.
    """
    if data.manager.io_dispatch.failed is None:
        for managed in failed:
            data.give_up(managed)
    error.add_note(
        f"The optimizer step failed while updating chunk {next(iter(failed)).location.chunk} "
        f"({', '.join(managed.name for managed in failed)}). These parameters may be updated in part, and their "
        f"gradients are lost. Load a checkpoint before training on."
    )
