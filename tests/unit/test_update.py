"""Homes of an update: the tensors that it reads and writes, on a page and in memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patrickstar._layout.schema import DELAYED16, GRAD32, PARAM16, PARAM32
from patrickstar._step.disk_speculation import SparePages
from patrickstar._step.update import DelayedList, InPlace, Page

RULE: Any = None
FIRST, NUMEL = 3, 6
"""Elements of the parameter in its chunks."""
PAGE = Page(0, 4, 4)
"""Has the parameter's second to fifth elements."""


class Stub(SimpleNamespace):
    """Object with these attributes that can be a key."""

    __hash__ = object.__hash__


class Param(Stub):
    """Parameter whose chunks are tensors."""

    def flat(self, chunk: torch.Tensor, *, in_order: bool = False) -> torch.Tensor:
        return chunk[FIRST : FIRST + NUMEL]


def chunk(value: int) -> torch.Tensor:
    return torch.arange(12.0) + 100 * value


@pytest.fixture
def managed() -> Param:
    return Param(
        name="weight",
        location=SimpleNamespace(chunk=0, offset=FIRST, numel=NUMEL),
        schema=SimpleNamespace(
            state_lists=[SimpleNamespace(kind=PARAM32)], master_dtype="float32", gradients_beside=False
        ),
        state=SimpleNamespace(accumulated=False),
        overlays_shard=True,
        shard_chunk=chunk(1),
    )


@pytest.fixture
def data(managed: Param) -> Any:
    """Return model data whose chunk of masters is on a page, and whose other lists are in memory."""
    chunks = {(DELAYED16, 0): chunk(2), (GRAD32, 0): chunk(3)}
    by_chunk = {0: [SimpleNamespace(shard_chunk=Stub(version=1, in_memory=True))]}
    return SimpleNamespace(
        manager=chunks, by_chunk=by_chunk, gradient_sums=lambda index: [], state_chunks=lambda index: []
    )


def span(home: Any, managed: Param, **more: torch.Tensor) -> dict[str, list[float]]:
    """Return the tensors of the update of `PAGE`, as lists."""
    (found,) = home.spans(PAGE, {managed: RULE}, {PARAM32: chunk(9)[4:8], **more})
    grad = {"grad": found.grad.latest.tolist()}
    grad |= {} if found.grad.accumulated is None else {"accumulated": found.grad.accumulated.tolist()}
    return {"param": found.param.tolist(), **grad, "master": found.master.tolist()}


def elements(value: int) -> list[float]:
    """Return the elements of `PAGE` in `chunk(value)`."""
    return chunk(value)[4:8].tolist()


@pytest.mark.parametrize(
    ("page", "part"),
    [
        (Page(0, 0, 3), None),
        (Page(0, 0, 4), slice(0, 1)),
        (PAGE, slice(1, 5)),
        (Page(0, 0, 12), slice(0, 6)),
        (Page(0, 8, 4), slice(5, 6)),
        (Page(0, 9, 3), None),
    ],
)
def test_a_page_has_a_part_of_a_parameter(page, part, managed):
    assert page.part(managed) == part


def test_in_place_the_new_parameter_overwrites_its_gradient(data, managed):
    assert span(InPlace(data), managed) == {"param": elements(1), "grad": elements(1), "master": elements(9)}


@pytest.mark.parametrize("overlays", [True, False])
@pytest.mark.parametrize("on_page", [True, False])
def test_in_place_accumulated_gradients_are_added(data, managed, overlays, on_page):
    managed.state.accumulated, managed.overlays_shard = True, overlays
    found = span(InPlace(data), managed, **({GRAD32: chunk(5)[4:8]} if on_page else {}))
    sums = elements(5 if on_page else 3)
    grad = {"grad": elements(1), "accumulated": sums} if overlays else {"grad": sums}
    assert found == {"param": elements(1), **grad, "master": elements(9)}


def test_in_spare_pages_the_new_parameter_leaves_the_gradient(data, managed):
    found = span(SparePages(data, 0, None), managed, **{PARAM16: chunk(7)[4:8]})
    assert found == {"param": elements(7), "grad": elements(1), "master": elements(9)}


def test_results_in_spare_pages_are_current_while_the_gradients_have_not_changed(data):
    home = SparePages(data, 0, None)
    assert home.is_current
    data.by_chunk[0][0].shard_chunk.version += 1
    assert not home.is_current


@pytest.mark.parametrize("listed", [True, False])
def test_a_delayed_update_uses_no_parameter_that_operators_read(data, managed, listed):
    found = span(DelayedList(data, {managed} if listed else ()), managed)
    assert found == {"param": elements(2), "grad": elements(3 if listed else 2), "master": elements(9)}
