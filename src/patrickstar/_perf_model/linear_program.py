"""Linear programs in a few variables that are shares or times: what is written as expressions, HiGHS solves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

Expression = NDArray[np.float64]
"""A constant, and the coefficient of each variable."""

SLACK = 1e-9
"""What a solver may be off by, relative to what it compares."""


@dataclass(frozen=True)
class Variables:
    """Some variables, none of them below zero."""

    count: int

    @property
    def one(self) -> Expression:
        """The constant."""
        return self[-1]

    def __getitem__(self, index: int) -> Expression:
        found = np.zeros(self.count + 1)
        found[index + 1] = 1.0
        return found


def value(expression: Expression, at: NDArray[np.float64]) -> float:
    """What an expression is where the variables have these values."""
    return float(expression[0] + expression[1:] @ at)


def least(
    objective: Expression, not_above_zero: Sequence[Expression], zero: Sequence[Expression]
) -> NDArray[np.float64] | None:
    """The values of the variables with the least objective, under conditions; None where there are none such."""
    upper, equal = np.array([_scaled(one) for one in not_above_zero]), np.array(zero)
    found = linprog(
        objective[1:], A_ub=upper[:, 1:], b_ub=-upper[:, 0], A_eq=equal[:, 1:], b_eq=-equal[:, 0], method="highs"
    )
    # A solver keeps to its bounds but for some rounding.
    return None if found.x is None else np.maximum(0.0, np.asarray(found.x, dtype=np.float64))


def _scaled(expression: Expression) -> Expression:
    """Bytes are counted in billions and shares in ones: a solver wants them alike."""
    return expression / max(1e-12, float(np.abs(expression).max()))
