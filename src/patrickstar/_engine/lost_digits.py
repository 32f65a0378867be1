"""Warning about frozen parameters that leave an engine with fewer digits than they came with."""

import logging
from collections.abc import Iterable

from patrickstar._layout.byte_size import format_size
from patrickstar._params.managed_param import ManagedParam

_log = logging.getLogger(__name__)


def warn_of_lost_digits(params: Iterable[ManagedParam]) -> None:
    """Log how many frozen parameters come back in a smaller dtype than they were given in, and what to do.

    Chunks hold frozen parameters in the compute dtype only. Copies in fp32 would take twice as much as that, of memory
    or of the disk, for values that are in the file that the model was loaded from.

    Args:
        params: Parameters of an engine that is about to be closed.
    """
    found = [managed for managed in params if managed.loses_digits]
    if not found:
        return
    given_bytes = sum(managed.numel * managed.given_dtype.itemsize for managed in found if managed.given_dtype)
    held_bytes = sum(managed.numel * managed.chunk.dtype.itemsize for managed in found)
    dtypes = ", ".join(sorted({str(managed.chunk.dtype).removeprefix("torch.") for managed in found}))
    _log.warning(
        "engine.close(): %d frozen parameters, %s elements, come back in %s, as chunks held them: %s of %s, from %r "
        "on. Digits that %s does not have are lost. To merge adapters without this loss, save them, load the base "
        "model again, in fp32, and merge there: PeftModel.from_pretrained(base, adapters).merge_and_unload()",
        len(found),
        f"{sum(managed.numel for managed in found):,}",
        dtypes,
        format_size(held_bytes),
        format_size(given_bytes),
        found[0].name,
        dtypes,
    )
