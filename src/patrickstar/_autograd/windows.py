"""Backward windows, and the nodes of the autograd graph that open them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.precision import tensors_in

# [Note: backward windows]
# An operator's parameters must be on the device again when its backward runs. Each node that the operator added to the
# graph gets a pre-hook that opens the operator's window: its parameters are fetched and stay pinned until another
# window opens or backward ends. All added nodes need the hook, not only the output's: an in-place operator on a view
# output replaces the output's node, and an LSTM adds hundreds of nodes. Autograd runs later nodes first, so the nodes
# of one operator run consecutively.
#
# [Note: recomputation inside a window]
# With activation checkpointing, a node's saved tensors are recomputed after its pre-hook has run, so the recomputed
# operators access parameters while a window is open. If both do not fit, the window is suspended while the recomputed
# operator runs, so that the device never has to hold more than one operator's chunks.


class GraphSnapshot(NamedTuple):
    """State of the autograd graph before an operator, used to identify the nodes that the operator adds.

    Sequence numbers identify them within a thread. A recomputation may run in a thread of autograd, which counts from
    zero; there the nodes of the operands bound the traversal.
    """

    number: int
    operands: frozenset[Any]

    @classmethod
    def now(cls, args: Any, kwargs: Any) -> "GraphSnapshot":
        operands = {tensor.grad_fn for tensor in tensors_in((args, kwargs)) if tensor.requires_grad}
        return cls(torch._C._autograd._get_sequence_nr(), frozenset(operands))

    def contains(self, node: Any) -> bool:
        """Return whether a node existed before the operator, or accumulates a leaf's gradient."""
        return node in self.operands or hasattr(node, "variable") or node._sequence_nr() < self.number

    def added_nodes(self, output_nodes: list[Any]) -> Iterator[Any]:
        """Yield the nodes that were added since this snapshot and are reachable from `output_nodes`."""
        seen, nodes = set(), output_nodes
        while nodes:
            node = nodes.pop()
            if node in seen or self.contains(node):
                continue
            seen.add(node)
            yield node
            nodes.extend(follower for follower, _ in node.next_functions if follower is not None)


def custom_function_nodes(loss: torch.Tensor) -> Iterator[Any]:
    """Yield the nodes of custom Functions in the graph of `loss`, except those of reentrant checkpointing."""
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.extend(follower for follower, _ in node.next_functions)
        if isinstance(node, BackwardCFunction) and not isinstance(node, CheckpointFunction):
            yield node


@dataclass(eq=False, slots=True)
class Window:
    """The parameters that one operator and its backward read."""

    managed_params: Sequence[ManagedParam]


class ModuleUse(NamedTuple):
    """One running call of a module that has a single window for all its operators."""

    managed_params: tuple[ManagedParam, ...]
    original_classes: list[ManagedParam]
    before: GraphSnapshot
    suspended: Window | None
