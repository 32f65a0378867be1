"""Gradient of a weight that is zero but for the rows that were looked up."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowGradient:
    """Rows of a gradient, on the host.

    Args:
        indices: Index of each row in the weight; rows of the same index are added.
        rows: A matrix.
        count: Number of rows of the weight.
    """

    indices: torch.Tensor
    rows: torch.Tensor
    count: int

    def write(self, target: torch.Tensor) -> None:
        """Overwrite a tensor of the weight's shape with the gradient."""
        target.zero_().index_add_(0, self.indices, self.rows)

    def to_dense(self) -> torch.Tensor:
        """Return the whole gradient."""
        dense = self.rows.new_empty(self.count, self.rows.shape[1])
        self.write(dense)
        return dense
