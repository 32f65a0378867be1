"""A rule: how one gradient changes one parameter, element by element, as an ordered list of IEEE operations."""

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

# [Note: the same bits everywhere]
# A chunk may be updated on the host in one step and on the device in the next, by 1 thread or by 16, in C++, in Triton
# or by PyTorch's operators. So that nobody can tell, a rule is an ordered list of operations, each rounded correctly to
# the master's dtype as IEEE 754 says: addition, subtraction, multiplication, division, square root. None may be
# contracted with another (no fused multiply-add), approximated, or flushed where it is denormal. Rounding to 16 bits is
# to nearest, ties to even. Which NaN an operation returns differs between machines, so what is stored is always the
# quiet NaN without payload. Scalars are computed in double precision and rounded once to the master's dtype.
# `Rule.apply` is the list, written in PyTorch's operators; where another implementation differs, that one is wrong.


SMALLEST, SMALLEST_NORMAL = 2.0**-149, 2.0**-126
"""Of float32: what its denormal numbers are multiples of, and where they end."""


def rounded(value: float, dtype: torch.dtype) -> float:
    """A Python number as the nearest number of a master's dtype."""
    if dtype == torch.float64:
        return value
    if abs(value) < SMALLEST_NORMAL:  # which the processor would flush if the user told it to
        return math.copysign(round(value / SMALLEST) * SMALLEST, value)
    return ctypes.c_float(value).value


@dataclass(frozen=True)
class Rule(ABC):
    """The hyper-parameters of one update of one parameter, and what they do to it."""

    code: ClassVar[int | None] = None
    """Its number in the C++ kernel, if it is there."""

    by_pages: ClassVar[bool] = True
    """Whether `apply` may be given a parameter in pieces."""

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]:
        """The chunk lists of its states, beyond the master, in the order `apply` takes them."""

    @property
    def mode(self) -> int:
        """Which of the rule's variants this is, for the C++ kernel."""
        return 0

    def scalars(self, dtype: torch.dtype) -> tuple[float, ...]:
        """What `apply` multiplies by and adds, rounded to the master's dtype, in the C++ kernel's order."""
        return ()

    @abstractmethod
    def apply(self, master: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Update `master` and `states` in place; `grad`, of the same dtype, may be overwritten.

        All are flat and of one length: some elements of one parameter. What `apply` does to an element may depend on
        nothing but the element, or it could not be cut into pages.
        """


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient, flat: what came last, and what was summed before it, if anything was.

    `dtype` is the master's, in which the two are added. Kernels take what lies on one device: see `together`.
    """

    latest: torch.Tensor
    accumulated: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        """Elements."""
        return self.latest.numel()

    def together(self) -> "Gradient":
        """The same on one device: the 16-bit part is copied to where the other lies, if that is elsewhere."""
        return self if self.accumulated is None else replace(self, latest=self.latest.to(self.accumulated.device))

    def page(self, page: slice) -> "Gradient":
        """Some elements of it."""
        return Gradient(self.latest[page], None if self.accumulated is None else self.accumulated[page], self.dtype)

    def scaled(self, scales: Sequence[float]) -> torch.Tensor:
        """A new tensor: the sum in the master's dtype, multiplied by `scales` one after the other."""
        grad = self.latest.to(self.dtype, copy=True)
        if self.accumulated is not None:
            grad.add_(self.accumulated)
        for scale in scales:
            grad.mul_(scale)
        return grad


@dataclass(frozen=True)
class Span:
    """A parameter's elements in the parallel lists: flat tensors of one length on one device.

    `param` receives the rounded master, and may be the memory of `grad.last`.
    """

    param: torch.Tensor
    grad: Gradient
    master: torch.Tensor
    states: tuple[torch.Tensor, ...]
    rule: Rule

    @property
    def numel(self) -> int:
        """Elements."""
        return self.master.numel()

    def page(self, page: slice) -> "Span":
        """Some elements of it."""
        states = tuple(state[page] for state in self.states)
        return Span(self.param[page], self.grad.page(page), self.master[page], states, self.rule)
