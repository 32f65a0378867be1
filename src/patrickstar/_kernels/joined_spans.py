"""Neighbours in a chunk, updated as one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from patrickstar._kernels.update_rule import Span
from patrickstar._layout.chunk_mapping import ALIGN_NUMEL


def joined(spans: Sequence[Span]) -> Iterator[Span]:
    """Join spans with one rule that lie behind each other in their chunks, so that one launch or piece updates them.

    What lies between them is less than a parameter's alignment: elements of no parameter. They are updated, too.
    """
    run: list[Span] = []
    places: list[list[int]] = []
    for span in spans:
        if span.numel == 0:
            continue
        lists = _lists(span)
        addresses = [each.data_ptr() for each in lists]
        if run and not _follows(run, places, span, lists, addresses):
            yield from _whole(run)
            run, places = [], []
        run.append(span)
        places.append(addresses)
    if run:
        yield from _whole(run)


def _follows(
    run: Sequence[Span], places: Sequence[list[int]], span: Span, lists: list[torch.Tensor], addresses: list[int]
) -> bool:
    """Return whether a span's lists lie behind those of a run's last span, each as many elements behind."""
    last, earlier = run[-1], places[-1]
    step = (addresses[0] - earlier[0]) // span.param.itemsize
    return (
        last.numel <= step < last.numel + ALIGN_NUMEL
        and span.rule.by_pages
        and len(addresses) == len(earlier)
        and [(each.dtype, each.device) for each in lists] == [(each.dtype, each.device) for each in _lists(last)]
        and all(
            address - before == step * each.itemsize
            for address, before, each in zip(addresses, earlier, lists, strict=True)
        )
        and span.rule == last.rule
    )


def _whole(run: Sequence[Span]) -> Sequence[Span]:
    """Return one span for a run of them; the run itself if it is not one memory."""
    first, last = run[0], run[-1]
    numel = (last.param.data_ptr() - first.param.data_ptr()) // first.param.itemsize + last.numel
    ends = [(each.storage_offset() + numel) * each.itemsize for each in _lists(first)]
    sizes = [each.untyped_storage().nbytes() for each in _lists(first)]
    if len(run) == 1 or any(end > size for end, size in zip(ends, sizes, strict=True)):
        return run

    def whole(values: torch.Tensor) -> torch.Tensor:
        return values.as_strided((numel,), (1,))

    accumulated = first.grad.accumulated
    grad = replace(
        first.grad, latest=whole(first.grad.latest), accumulated=None if accumulated is None else whole(accumulated)
    )
    states, out = tuple(map(whole, first.states)), None if first.out is None else tuple(map(whole, first.out))
    return [replace(first, param=whole(first.param), grad=grad, master=whole(first.master), states=states, out=out)]


def _lists(span: Span) -> list[torch.Tensor]:
    tensors = (span.param, span.grad.latest, span.grad.accumulated, span.master, *span.states, *(span.out or ()))
    return [tensor for tensor in tensors if tensor is not None]
