"""Linear programs over a few non-negative variables, written as expressions and solved by HiGHS."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

Expression = NDArray[np.float64]
"""A constant, followed by the coefficient of each variable."""
Solution = NDArray[np.float64]
"""Value of each variable."""

SLACK = 1e-9
"""Relative tolerance of the solver."""


@dataclass(frozen=True)
class Variables:
    """Non-negative variables; indexing returns the expression of one of them."""

    count: int

    @property
    def one(self) -> Expression:
        """Constant expression 1."""
        return self[-1]

    def __getitem__(self, index: int) -> Expression:
        expression = np.zeros(self.count + 1)
        expression[index + 1] = 1.0
        return expression


def value(expression: Expression, values: Solution) -> float:
    """Evaluate an expression at the given values of the variables."""
    return float(expression[0] + expression[1:] @ values)


def minimize(
    objective: Expression, not_above_zero: Sequence[Expression], zero: Sequence[Expression]
) -> Solution | None:
    """Return the values of the variables that minimize the objective; None if the constraints are infeasible."""
    upper, equal = np.array([_scaled(expression) for expression in not_above_zero]), np.array(zero)
    solution = linprog(
        objective[1:], A_ub=upper[:, 1:], b_ub=-upper[:, 0], A_eq=equal[:, 1:], b_eq=-equal[:, 0], method="highs"
    )
    # The solver respects bounds only up to rounding.
    return None if solution.x is None else np.maximum(0.0, np.asarray(solution.x, dtype=np.float64))


def _scaled(expression: Expression) -> Expression:
    """Scale the largest coefficient to 1: bytes are in billions and shares below 1, which the solver handles badly."""
    return expression / max(1e-12, float(np.abs(expression).max()))
