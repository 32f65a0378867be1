"""Liger's loss, whose kernels read parameters by their addresses, in chunks: a process of `test_own_process.py`."""

import pytest
import torch
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
from torch import nn

import patrickstar as ps
from patrickstar import testing


class LossInModel(nn.Module):
    """Language model whose output layer and loss are one function of Liger's, on the layer's weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.head, self.loss = nn.Linear(16, 32), LigerFusedLinearCrossEntropyLoss()

    def forward(self, ids):
        hidden = self.layer(self.embedding(ids))
        return self.loss(self.head.weight, hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), self.head.bias)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("budget", [None, 16 << 10])
def test_bits_are_those_of_plain_pytorch_with_the_same_kernels(precision, budget):
    """Without a budget everything is evicted at each access; memory that is not a parameter's is NaN."""
    batches = [(torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(each)),) for each in range(2)]
    host = None if budget is None else 1 << 20
    config = ps.Config(device="cpu", precision=precision, chunk_size=1024, device_memory=budget, host_memory=host)
    testing.assert_exact(LossInModel, batches, config, stress=budget is None)
