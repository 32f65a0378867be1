"""Gradient of a weight that is zero but for the rows that were looked up."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowGradient:
    """Matrix of rows on the host, with the index of each in a weight of `count` rows; those of one index are added."""

    indices: torch.Tensor
    rows: torch.Tensor
    count: int

    def write(self, target: torch.Tensor) -> torch.Tensor:
        """Overwrite a tensor of the weight's shape with the gradient, and return it."""
        if target.device != self.rows.device:
            return target.copy_(self.to_dense())
        return target.zero_().index_add_(0, self.indices, self.rows)

    def to_dense(self) -> torch.Tensor:
        """Return the whole gradient."""
        return self.write(self.rows.new_empty(self.count, self.rows.shape[1]))
