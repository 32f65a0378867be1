"""Calls in which several processes act together."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from patrickstar._layout.chunk_mapping import Layout
from patrickstar._params.managed_param import ManagedParam
from patrickstar._schedule.coordination import Request


class ProcessHooks:
    """Calls in which several processes act together. With one process they do nothing; `ShardedModelData` overrides."""

    def register_shards(self, layout: Layout) -> None:
        """Record the shard bounds of new chunks."""

    def synchronize_processes(self, want: Request) -> None:
        """Synchronize all processes on `want`, and complete all reductions."""

    def synchronize_gradients(self, want: Request) -> None:
        """Synchronize all processes, and agree on which parameters have gradients."""

    def collective_section(self) -> AbstractContextManager[None]:
        """Return a context for work that every process must do after a synchronization."""
        return nullcontext()

    def synchronize_to_drop(self) -> None:
        """Synchronize all processes before gradients are discarded, if any process may have gradients."""

    def close_step(self, updated: Iterable[ManagedParam]) -> None:
        """Finish an optimizer step. `updated`: parameters in a param group; empty if the update was skipped."""

    def gather_parts(self, managed: ManagedParam, flat: torch.Tensor) -> None:
        """All-gather a parameter's elements into `flat`, which already contains this rank's shard."""

    def assemble(self, managed: ManagedParam, part: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Gather the parts of a DTensor, of which this process holds `part`, on the host, in `out` if given."""
        return part if out is None else out.copy_(part)

    def drop_gathered(self, indices: Iterable[int] | None = None) -> None:
        """Drop gathered chunks (default: all), whose values have changed on other ranks."""

    def end_window(self, managed_params: Sequence[ManagedParam]) -> None:
        """End the window of an operator's backward, in which these parameters may have got gradients."""

    def progress(self) -> None:
        """Start reductions that are ready; called between two operators of a backward."""
