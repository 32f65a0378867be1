"""Tensors that the update of one parameter accesses on a page of states from disk."""

from collections.abc import Mapping

import torch

from patrickstar._kernels.update_rule import Gradient, Rule, Span
from patrickstar._layout.schema import DELAYED16, GRAD32
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._step.staging_pool import PageSet, StagingPool


def page_span(
    data: ModelData,
    pool: StagingPool,
    managed: ManagedParam,
    rule: Rule,
    part: slice,
    pages: PageSet,
    views: Mapping[str, torch.Tensor],
    *,
    in_order: bool,
) -> Span:
    """Return the tensors that the update of some elements of a parameter accesses.

    Args:
        part: Elements of the parameter that are on the page.
        views: Page of each list.
        in_order: See `Chunk.flat`.
    """
    first = managed.location.offset - pages.first
    on_page = slice(first + part.start, first + part.stop)
    listed, accumulated, dtype = pages.owner.listed, None, getattr(torch, managed.schema.master_dtype)
    if managed.state.accumulated if listed is None else managed in listed:
        page = views.get(GRAD32)
        chunk = data.manager[GRAD32, managed.location.chunk]
        accumulated = page[on_page] if page is not None else managed.flat(chunk, in_order=in_order)[part]
    if listed is not None:
        param = views[DELAYED16][on_page]
    else:
        param = managed.flat(managed.shard_chunk, in_order=in_order)[part]
    if accumulated is None:
        assert managed.overlays_shard or listed is not None, f"{managed.name} has no gradient"
        grad = Gradient(param, None, dtype)
    elif listed is None and managed.overlays_shard:
        grad = Gradient(param, accumulated, dtype)
    else:
        grad = Gradient(accumulated, None, dtype)
    if pages.owner.speculative:
        param = pool.param_view(pages, param.dtype)[on_page]
    master, *states = (views[spec.kind][on_page] for spec in managed.schema.state_lists)
    return Span(param, grad, master, tuple(states), rule, name=managed.name)
