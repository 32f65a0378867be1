"""Base class of the update rules, and the tensors that one update reads and writes."""

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from patrickstar._layout.chunk_mapping import ALIGN_NUMEL

# [Note: bitwise-identical backends]
# A chunk may be updated on the host in one step and on the device in the next, by 1 thread or by 16, in C++, in Triton
# or by PyTorch's operators. To make the result independent of that choice, a rule is an ordered list of additions,
# subtractions, multiplications, divisions and square roots, each correctly rounded to the master's dtype (IEEE 754).
# No two may be contracted (no fused multiply-add), none may be approximated, and denormals must not be flushed to zero.
# Rounding to 16 bits is to nearest, ties to even. Machines differ in which NaN an operation returns, so every stored
# NaN is replaced by the quiet NaN without payload. Scalars are computed in double precision and rounded once to the
# master's dtype. `Rule.apply`, written with PyTorch's operators, is the reference: a backend that differs is wrong.


SMALLEST_DENORMAL, SMALLEST_NORMAL = 2.0**-149, 2.0**-126
"""Smallest positive denormal and normal number of float32."""


def rounded(value: float, dtype: torch.dtype) -> float:
    """Round a Python float to the nearest number of a master dtype."""
    if dtype == torch.float64:
        return value
    if abs(value) < SMALLEST_NORMAL:  # the processor would flush it if the user enabled that
        return math.copysign(round(value / SMALLEST_DENORMAL) * SMALLEST_DENORMAL, value)
    return ctypes.c_float(value).value


def interpolate_(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    """Move `start` towards `end` by the fraction `weight`, in place and without a fused multiply-add, and return it.

    Args:
        start: Values to be moved.
        end: Values of the same shape and dtype.
        weight: Fraction, rounded to the dtype. From 1/2 on, the result is computed from the nearer end, as `torch.lerp`
            does.
    """
    weight = rounded(weight, start.dtype)
    if weight == 1.0:
        return start.copy_(end)
    if abs(weight) < 0.5:
        return start.add_((end - start).mul_(weight))
    return torch.add(end, (end - start).mul_(rounded(weight - 1.0, start.dtype)), out=start)


@dataclass(frozen=True)
class Rule(ABC):
    """Hyper-parameters of one update of one parameter, and the element-wise arithmetic that applies it.

    To write an optimizer of your own, derive a frozen dataclass from this class and implement `kinds` and `apply`.

    Attributes:
        code: Identifier of the rule in the C++ and Triton backends. None: the rule runs on PyTorch's operators.
        by_pages: True if `apply` may be called on consecutive pieces of a parameter, False if it needs all elements.
        needs_shape: True if the new value of an element depends on others of its parameter. `by_pages` is False then,
            `for_param` receives the shape, and no parameter is cut between processes.
        workspace_items: Upper bound on the simultaneous temporaries of `apply`, the gradient among them, counted in
            tensors of the master's dtype and of as many elements.
    """

    code: ClassVar[int | None] = None
    by_pages: ClassVar[bool] = True
    needs_shape: ClassVar[bool] = False
    workspace_items: ClassVar[int] = 6  # Lion needs 5.25

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """Names of the optimizer states besides the master parameter, in the order in which `apply` takes them."""

    @property
    def mode(self) -> int:
        """Variant of the rule, as the C++ and Triton backends number them."""
        return 0

    def for_param(self, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> "Rule":
        """Return the rule for one parameter; by default this rule.

        Args:
            shape: Shape of the parameter.
            strides: Its strides in elements: the flat tensors of `apply` are in its memory order.
            device: Compute device. Masters and states may be on another.
        """
        return self

    def scalars(self, dtype: torch.dtype) -> tuple[float, ...]:
        """Return the scalar operands of `apply`.

        Args:
            dtype: Dtype of the master parameter.

        Returns:
            The scalars rounded to `dtype`, in the order that the C++ and Triton backends expect.
        """
        return ()

    @abstractmethod
    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Update `master` and `states` in place.

        All tensors are flat, have the same length and dtype, and hold the same elements of one parameter. Unless
        `needs_shape`, the new value of an element must depend on that element alone: a parameter may be split into
        pages, and between processes.

        Args:
            master: Master parameter (fp32; float64 for float64 parameters).
            grad: Unscaled and clipped gradient. It may be overwritten.
            states: Optimizer states, in the order of `kinds`.
        """


@dataclass(frozen=True)
class Gradient:
    """Flat gradient of one parameter: the latest one and, if any, the sum of the earlier ones.

    `dtype` is the master's; the two are added in it. Backends need both parts on one device: see `together`.
    """

    latest: torch.Tensor
    accumulated: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return self.latest.numel()

    def together(self) -> "Gradient":
        """Return the gradient with `latest` copied to the device of `accumulated` if they differ."""
        return self if self.accumulated is None else replace(self, latest=self.latest.to(self.accumulated.device))

    def page(self, page: slice) -> "Gradient":
        return Gradient(self.latest[page], None if self.accumulated is None else self.accumulated[page], self.dtype)

    def scaled(self, scales: Sequence[float]) -> torch.Tensor:
        """Return the sum of both parts, multiplied by `scales` one after the other, as a new tensor of `dtype`."""
        grad = self.latest.to(self.dtype, copy=True)
        if self.accumulated is not None:
            grad.add_(self.accumulated)
        for scale in scales:
            grad.mul_(scale)
        return grad


@dataclass(frozen=True)
class Span:
    """Elements of one parameter in the parallel chunk lists: flat tensors of one length on one device.

    `param` receives the rounded master and may share the memory of `grad.latest`.

    `out` receives the new master and the new states, in this order, and shares no memory with the other tensors; the
    old ones are then only read. None: the new values replace the old ones.
    """

    param: torch.Tensor
    grad: Gradient
    master: torch.Tensor
    states: tuple[torch.Tensor, ...]
    rule: Rule
    out: tuple[torch.Tensor, ...] | None = None
    name: str = ""
    """Name of the parameter, for records."""
    upper: torch.Tensor | None = None
    """Parameter before the update, if `master` is the lower half of a split one; it may be `param`.

    See [Note: split masters]."""

    @property
    def numel(self) -> int:
        return self.master.numel()

    def page(self, page: slice) -> "Span":
        states = tuple(state[page] for state in self.states)
        out = None if self.out is None else tuple(values[page] for values in self.out)
        upper = None if self.upper is None else self.upper[page]
        return Span(self.param[page], self.grad.page(page), self.master[page], states, self.rule, out, self.name, upper)


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
    spaces = (each.untyped_storage().nbytes() // each.itemsize - each.storage_offset() for each in _lists(first))
    if len(run) == 1 or numel > min(spaces):
        return run

    def whole(values: torch.Tensor) -> torch.Tensor:
        return values.as_strided((numel,), (1,))

    accumulated = first.grad.accumulated
    grad = replace(
        first.grad, latest=whole(first.grad.latest), accumulated=None if accumulated is None else whole(accumulated)
    )
    states, out = tuple(map(whole, first.states)), None if first.out is None else tuple(map(whole, first.out))
    param, master = whole(first.param), whole(first.master)
    upper = None if first.upper is None else whole(first.upper)
    return [replace(first, param=param, grad=grad, master=master, states=states, out=out, upper=upper)]


def _lists(span: Span) -> list[torch.Tensor]:
    grad, new = (span.grad.latest, span.grad.accumulated), span.out or ()
    tensors = (span.param, *grad, span.master, *span.states, *new, span.upper)
    return [tensor for tensor in tensors if tensor is not None]
