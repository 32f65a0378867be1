"""Mixture-of-experts layers: feed-forward networks of which each token uses a few, and the load of the busiest."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import pdtr, pdtrc

TAIL = 12
"""Standard deviations around the mean outside of which the distribution function is 0 or 1 to double precision."""


@dataclass(frozen=True)
class FeedForward:
    """Feed-forward network of two matrices: a layer's own, or one expert.

    Attributes:
        hidden: Width of input and output.
        ffn: Width between the matrices.
        biases: Both matrices have a bias.
        saved_bytes_per_unit: Bytes that a token saves for backward per unit between the matrices.
    """

    hidden: int
    ffn: int
    biases: bool
    saved_bytes_per_unit: int

    def numel(self, tp: int = 1) -> int:
        """Return the elements of one of `tp` parts; the bias of the second matrix is in all parts."""
        divided = 2 * self.hidden * self.ffn + (self.ffn if self.biases else 0)
        return divided // tp + (self.hidden if self.biases else 0)

    def operations(self, tokens: int) -> int:
        """Return the forward operations for `tokens` tokens."""
        return 4 * tokens * self.hidden * self.ffn

    def saved_bytes(self, tp: int = 1) -> float:
        """Return the bytes between the matrices that a token saves for backward in one of `tp` processes."""
        return self.saved_bytes_per_unit * self.ffn / tp


@dataclass(frozen=True)
class Experts:
    """Experts of the layers that have some, in place of a feed-forward network.

    Attributes:
        count: Number of experts per layer.
        top_k: Number of experts that process each token.
        every: Distance of layers with experts; 2 means every second layer.
        capacity_factor: Size of each expert's buffer, relative to the mean number of tokens. Smaller numbers are
            padded, tokens beyond it are dropped (Fedus et al. 2022, section 2.2). None: no buffer, no dropped token.
    """

    count: int
    top_k: int = 1
    every: int = 1
    capacity_factor: float | None = None


def expected_maximum(mean: float, bins: int) -> float:
    """Return the expected maximum of `bins` independent Poisson variables of one mean.

    With uniform routing the tokens of each process are nearly such variables: of n routed tokens each goes to one of
    `bins` processes, so a count is binomial with mean n / bins. The counts have a fixed sum, which lowers the maximum
    slightly. The expectation is the sum over m >= 0 of P(maximum > m) = 1 - F(m)^bins; F is the distribution function.
    """
    spread = TAIL * (math.sqrt(mean) + 1) + math.log(bins)
    first, last = max(0, math.floor(mean - spread)), math.ceil(mean + spread)
    counts = np.arange(first, last + 1)
    with np.errstate(divide="ignore"):
        # The upper tail is computed from 1 - F, which a subtraction from 1 would round to 0.
        log_below = np.where(counts < mean, np.log(pdtr(counts, mean)), np.log1p(-pdtrc(counts, mean)))
    return first + float(np.sum(-np.expm1(bins * log_below)))
