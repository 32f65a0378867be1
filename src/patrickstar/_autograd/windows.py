"""Backward windows, and the nodes of the autograd graph that open them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.precision import WITHOUT_TENSORS, tensors_in

# [Note: backward windows]
# An operator's parameters must be on the device again when its backward runs. Each node that the operator added to the
# graph gets a pre-hook that opens the operator's window: its parameters are fetched and stay pinned until another
# window opens or backward ends. All added nodes need the hook, not only the output's: an in-place operator on a view
# output replaces the output's node, and an LSTM adds hundreds of nodes. Autograd runs later nodes first, so the nodes
# of one operator run consecutively.
#
# [Note: windows on held chunks]
# A window on chunks that are held until the step is needed only if a gradient was written over a parameter, or a chunk
# had to be evicted nevertheless. There, hooks on the nodes of the operator's outputs suffice: autograd runs these
# first, and then the other nodes of the operator before those of earlier operators. An output that is a view is the
# exception: a later in-place operator replaces its node, so all nodes are hooked.
#
# [Note: recomputation inside a window]
# With activation checkpointing, a node's saved tensors are recomputed after its pre-hook has run, so operators
# access parameters while a window is open. If both do not fit on the device, the window is suspended while the operator
# runs. The trace has no moments of it: later iterations, which may have room for both, follow the same trace.


class GraphSnapshot(NamedTuple):
    """State of the autograd graph before an operator, used to identify the nodes that the operator adds.

    Sequence numbers identify them within a thread. A recomputation may run in a thread of autograd, which counts from
    zero; there the nodes of the operands bound the traversal.
    """

    number: int
    operands: Collection[Any]

    @classmethod
    def now(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "GraphSnapshot":
        """Record the graph before an operator is called with these arguments."""
        operands = set()
        if torch.is_grad_enabled():  # otherwise it adds no nodes
            for value in (*args, *kwargs.values()) if kwargs else args:
                if isinstance(value, torch.Tensor):
                    if value.requires_grad:
                        operands.add(value.grad_fn)
                elif type(value) not in WITHOUT_TENSORS:
                    operands.update(tensor.grad_fn for tensor in tensors_in(value) if tensor.requires_grad)
        return cls(torch._C._autograd._get_sequence_nr(), operands)

    def contains(self, node: Any) -> bool:
        """Return whether a node existed before the operator, or accumulates a leaf's gradient."""
        return node in self.operands or hasattr(node, "variable") or node._sequence_nr() < self.number

    def added(self, nodes: Iterable[Any]) -> list[Any]:
        """Return those of `nodes` that were added since this snapshot."""
        return [node for node in nodes if not self.contains(node)]

    def added_nodes(self, output_nodes: list[Any]) -> list[Any]:
        """Return the nodes that were added since this snapshot and are reachable from `output_nodes`."""
        added: dict[Any, None] = {}
        while output_nodes:
            node = output_nodes.pop()
            if node not in added and not self.contains(node):
                added[node] = None
                output_nodes += [follower for follower, _ in node.next_functions if follower is not None]
        return list(added)


class HiddenNodes:
    """Parameters that were read by nodes which no interception has seen, by the sequence number of the node.

    These are nodes of custom Functions, since `Function.apply` is not intercepted, and of operators that native code
    calls on a `DetachedView`. Under checkpointing the tensors that such a Function saved are recomputed as
    plain tensors, whose operators are not intercepted either. Nodes of reentrant checkpointing are left out: what they
    recompute is intercepted.
    """

    def __init__(self) -> None:
        self._pending: dict[int, tuple[ManagedParam, ...]] = {}
        self._native: set[int] = set()

    def note(self, managed_params: Sequence[ManagedParam], *, native: bool = False) -> None:
        """Record parameters of an operator that runs without grad, or below autograd (`native`), in a forward."""
        number = torch._C._autograd._get_sequence_nr() - 1  # the node was created last
        self._pending[number] = tuple(dict.fromkeys((*self._pending.get(number, ()), *managed_params)))
        if native:
            self._native.add(number)

    def drain(self, loss: torch.Tensor) -> Iterator[tuple[Any, tuple[ManagedParam, ...]]]:
        """Yield the nodes in the graph of `loss` whose parameters are recorded, and forget these parameters.

        Other losses of the same step may have graphs of their own.
        """
        seen, nodes = set(), [loss.grad_fn] if self._pending else []
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes.extend(follower for follower, _ in node.next_functions)
            number = node._sequence_nr()
            is_function = isinstance(node, BackwardCFunction) and not isinstance(node, CheckpointFunction)
            if number in self._pending and (is_function or number in self._native):
                yield node, self._pending.pop(number)

    def clear(self) -> None:
        """Forget all parameters, after an exception or before a step."""
        self._pending.clear()
        self._native.clear()


@dataclass(eq=False, slots=True)
class Window:
    """The parameters that one operator and its backward read."""

    managed_params: Sequence[ManagedParam]
    held: bool = False
    """True while it is open on held chunks, which it only pins."""
    expected: bool = False
    """True until it opens for the first time, in a first iteration that updates in backward."""
