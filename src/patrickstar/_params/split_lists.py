"""Masters and second moments of split masters, as if each had a list of its own. See [Note: split masters]."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._kernels.rounding import canonical_nan_
from patrickstar._kernels.split_masters import joined_masters, magnitudes, split_masters, with_marks
from patrickstar._layout.schema import EXP_AVG_SQ, LOW16
from patrickstar._params.managed_param import ManagedParam
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import ModelError

PAGE_NUMEL = 1 << 18
"""Elements that are restored at a time, on the host: their temporaries have 6 MiB."""


class StoredLists(Protocol):
    """Access to lists as they are stored: `LocalShards`."""

    manager: ChunkManager

    def stored_parts(
        self, managed: ManagedParam, kind: str, *, write: bool = False, within: slice | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]: ...

    def chunk_of(self, managed: ManagedParam, kind: str) -> Chunk: ...


def restored_parts(
    data: StoredLists, managed: ManagedParam, kind: str, write: bool, within: slice
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield copies of masters or second moments on the host, page by page; see `LocalShards.parts`.

    Args:
        kind: `PARAM32` or `EXP_AVG_SQ`.
        write: Store each part again once the caller has changed it; a master with its parameter.
        within: Elements of this rank's shard.

    Raises:
        ModelError: A second moment that was written is negative.
    """
    param = managed.upper_kind
    for first in range(within.start, within.stop, PAGE_NUMEL):
        part = slice(first, min(first + PAGE_NUMEL, within.stop))
        marked = _read(data, managed, EXP_AVG_SQ, part)
        if kind == EXP_AVG_SQ:
            moments = magnitudes(marked)
            yield part, moments
            if write:
                _check(managed, moments)
                _write(data, managed, EXP_AVG_SQ, part, with_marks(magnitudes(moments), marked))
            continue
        masters = joined_masters(_read(data, managed, param, part), _read(data, managed, LOW16, part), marked)
        yield part, masters
        if write:
            upper, lower = torch.empty_like(masters, dtype=torch.bfloat16), torch.empty_like(masters, dtype=torch.int16)
            split_masters(canonical_nan_(masters), magnitudes(marked), upper, lower, marked)
            for each, values in ((param, upper), (LOW16, lower), (EXP_AVG_SQ, marked)):
                _write(data, managed, each, part, values)


def values_before(tensors: Iterable[torch.Tensor]) -> dict[ManagedParam, torch.Tensor]:
    """Return copies, on the host, of those tensors that are the upper halves of masters, and may be written.

    They have to be on the device. A write may replace the digits that their lower halves belong to.
    """
    managed_params = {managed for tensor in tensors for managed in getattr(tensor, "_managed_params", ())}
    return {managed: copy_of(managed) for managed in managed_params if managed.schema.gradients_beside}


def copy_of(managed: ManagedParam) -> torch.Tensor:
    """Return a copy of a parameter on the host; in a dry run, which has no values, the parameter."""
    payload = managed.payload()
    return payload if payload.is_meta else payload.to("cpu", copy=True)


def _check(managed: ManagedParam, moments: torch.Tensor) -> None:
    if moments.device.type != "meta" and bool((moments < 0).any()):
        raise ModelError(
            f"the state {EXP_AVG_SQ!r} of {managed.name!r} can't have negative elements, as it is a mean of squares"
        )


def _read(data: StoredLists, managed: ManagedParam, kind: str, within: slice) -> torch.Tensor:
    """Return a copy of elements of a list on the host; in a dry run, which has no values, without memory."""
    dtype, device = data.chunk_of(managed, kind).dtype, "meta" if data.manager.device.type == "meta" else "cpu"
    values = torch.empty(within.stop - within.start, dtype=dtype, device=device)
    for part, stored in data.stored_parts(managed, kind, within=within):
        values[part.start - within.start : part.stop - within.start].copy_(stored)
    return values


def _write(data: StoredLists, managed: ManagedParam, kind: str, within: slice, values: torch.Tensor) -> None:
    for part, stored in data.stored_parts(managed, kind, write=True, within=within):
        stored.copy_(values[part.start - within.start : part.stop - within.start])
