"""Backward windows: the parameters that an operator or a module reads, pinned again while its backward runs."""

from collections.abc import Sequence
from typing import NamedTuple

from patrickstar._autograd.graph import GraphSnapshot
from patrickstar._params.managed_param import ManagedParam

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


class Window:
    """The parameters that one operator and its backward read."""

    __slots__ = ("managed_params",)

    def __init__(self, managed_params: Sequence[ManagedParam]) -> None:
        self.managed_params = managed_params


class ModuleUse(NamedTuple):
    """One running call of a module that has a single window for all its operators."""

    managed_params: tuple[ManagedParam, ...]
    original_classes: list[ManagedParam]
    before: GraphSnapshot
    suspended: Window | None
