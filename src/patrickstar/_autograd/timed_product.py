"""Times of the products of activations and parameters in a recorded step on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from patrickstar._autograd.windows import GraphSnapshot
from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._params.managed_param import ManagedParam
from patrickstar._tiers.timeline import Timeline

PRODUCTS = {F.linear, torch.addmm, torch.mm, torch.matmul, torch.Tensor.mm, torch.Tensor.matmul}
PRODUCTS |= {torch.Tensor.__matmul__, torch.Tensor.__rmatmul__}


@dataclass
class TimedProduct:
    """One product whose forward, and whose backward, are added to the record of the step.

    A hook before and one after each node of its backward note the time, and change nothing. Updates and transfers are
    not a part of it.
    """

    timeline: Timeline
    weight: ManagedParam
    gradients: int
    """Number of products in its backward: one for the weight, one for its other factor, if these need gradients."""
    started_s: float
    operations: int = 0

    @classmethod
    def begin(
        cls, func: Any, args: Sequence[Any], managed_params: Sequence[ManagedParam], manager: ChunkManager
    ) -> "TimedProduct | None":
        """Return the product that is about to run; None if it is none, or its time is not to be recorded."""
        timeline = manager.timeline
        if timeline is None or func not in PRODUCTS or manager.hardware.accelerator is not None:
            return None
        weights = [managed for managed in managed_params if len(managed.shape) == 2]
        if len(weights) != 1:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [value for value in args if isinstance(value, torch.Tensor) and value.dim() > 1]
            gradients = sum(tensor.requires_grad for tensor in tensors)
        return cls(timeline, weights[0], gradients, timeline.seconds())

    def end(self, out: Any, before: GraphSnapshot) -> None:
        """Note the end of the forward, and follow the backward.

        Args:
            out: The product.
            before: The autograd graph before it.
        """
        if not isinstance(out, torch.Tensor) or not out.dim() or out.shape[-1] not in self.weight.shape:
            return
        # Each element of the result is a sum over the weight's other side; a multiply-add counts as two.
        self.operations = 2 * out.numel() * (self.weight.numel // max(1, out.shape[-1]))
        self.timeline.product(self.weight.name, self.operations, self.started_s, backward=False)
        if out.grad_fn is not None:
            for node in before.added_nodes([out.grad_fn]):
                node.register_prehook(self._begin_node)
                node.register_hook(self._end_node)

    def _begin_node(self, _: Any) -> None:
        self.started_s = self.timeline.seconds()

    def _end_node(self, *_: Any) -> None:
        # A product of several nodes counts once.
        operations, self.gradients = self.gradients * self.operations, 0
        self.timeline.product(self.weight.name, operations, self.started_s, backward=True)
