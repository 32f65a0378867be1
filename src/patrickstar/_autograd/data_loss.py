"""Closing of an engine after a failed disk or thread has lost bytes of chunks."""

import weakref
from collections.abc import Collection
from typing import Any

from patrickstar.errors import PeerError


def close_after_loss(
    release: "weakref.finalize[Any, Any] | None", error: BaseException, updated_in_part: Collection[str]
) -> None:
    """Close the engine by `release`, unless it is closed, and say in the error what was lost."""
    if release is None or not release.alive:
        return
    lost = release() or ()
    # Without the other processes nothing can be read back, so that the names say nothing.
    names = "" if isinstance(error, PeerError) or not lost else f": {', '.join(lost)}"
    partly = [name for name in updated_in_part if name not in lost]
    error.add_note(
        f"The engine is closed. {len(lost)} parameters could not be read back and are NaN{names}. "
        + (f"{len(partly)} may be updated in part: {', '.join(partly)}. " if partly else "")
        + "Continue from a saved state with a new engine."
    )
