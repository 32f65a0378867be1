"""Processes of a strategy of Lightning: started, joined and synchronized as by its DDPStrategy, without DDP."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed.constants import default_pg_timeout

_ParallelStrategy: Any = object
"""Class beside this one: the ParallelStrategy of Lightning's Trainer or of Fabric, which have no base in common."""


class Processes(_ParallelStrategy):  # type: ignore[misc]
    """Part of a strategy with one process per device. With one process there is no process group.

    Args:
        process_group_backend: Backend of the process group. Default: by the device.
        timeout: Timeout of its collectives.
        **options: Keyword arguments of `ParallelStrategy`.
    """

    launcher_class: type
    """Class of Lightning that starts the processes."""

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout, **options: Any
    ) -> None:
        self._num_nodes = 1
        self._backend, self._timeout = process_group_backend, timeout
        super().__init__(**options)

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._num_nodes = number

    @property
    def root_device(self) -> torch.device:
        """Device of this process."""
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        """Number of processes of this node."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """True with several processes: Lightning then gives each its share of the samples."""
        return self.num_nodes * self.num_processes > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Number of processes, and that of this one."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            self._launcher = self.launcher_class(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell Lightning the number of this process."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        vars(rank_zero_only)["rank"] = self.global_rank

    def setup_environment(self) -> None:
        """Join the other processes, if there are any."""
        super().setup_environment()
        self.set_world_ranks()
        if self.is_distributed:
            reset_seed()
            backend = self._backend or _get_default_process_group_backend_for_device(self.root_device)
            device = None if self.root_device.type == "cpu" else self.root_device
            _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device)

    # A process that waits in a collective of Lightning can't serve the others' requests for its shards.

    def synchronize(self) -> None:
        """Wait for the other processes, and serve their requests meanwhile."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes. `name` is ignored."""
        self.synchronize()
        if _distributed_is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of process `src`."""
        self.synchronize()
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, or another reduction, of a tensor over all processes; other objects unchanged."""
        self.synchronize()
        return _sync_ddp_if_available(tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all processes; see `ParallelStrategy.all_gather`."""
        self.synchronize()
        gathered: torch.Tensor = super().all_gather(tensor, group, sync_grads)
        return gathered
