"""Simulated processes of a dry run: the others do what this one does, and collectives take time on a channel."""

import json
from collections.abc import Sequence
from typing import Any

import torch

from patrickstar._distributed.collectives import Bounds, Collectives, Levels, sum_dtype
from patrickstar._distributed.coordinator import Coordinator
from patrickstar._distributed.process_group import Partition, RankGroup, World
from patrickstar._dry_run.cluster import Cluster
from patrickstar._dry_run.simulated_channels import SimulatedTransfer
from patrickstar._dry_run.simulated_hardware import SimulatedHardware
from patrickstar._hardware.transfer import CompletedTransfer, Transfer
from patrickstar._schedule.coordination import Message

# [Note: simulated processes]
# A dry run of several processes simulates the first one; the others run the same operators on batches of the same
# shape. So they make the same requests at the same time, and a coordination step agrees on what this process requests.
# Everything else is the code of a real run: layout, shards, coordination, counters. Three things are replaced. A
# `SimulatedWorld` answers for all processes what this one says, collectives move no bytes but occupy a channel, and
# each process has its part of what the processes of a machine share (`Machine.share`).


class SimulatedGroup(RankGroup):
    """Group of processes that all have what this one has."""

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        super().__init__(world, ranks, None, None)

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        return own.view(1, -1).expand(self.size, -1)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Do nothing: the tensor has the values of the others."""


class SimulatedCoordinator(Coordinator[Any]):
    """Coordinator that takes the others' messages to be those of this process."""

    def __init__(self, world: World, group: RankGroup, collectives: "SimulatedCollectives") -> None:
        super().__init__(world, group, collectives)
        self._clock, self._seconds = collectives.hardware.clock, collectives.cluster.coordination_s

    def _exchange(self, message: Message) -> list[Message]:
        start_s = self._clock.now
        self._clock.now += self._seconds
        self._clock.record_wait(start_s, "coordination", "coordination step")
        self._clock.wait_for_device()
        return [message] * self.group.size


class SimulatedWorld(World):
    """First of several simulated processes. See [Note: simulated processes]."""

    def __init__(self, hardware: SimulatedHardware, cluster: Cluster) -> None:
        self.rank, self.size = 0, cluster.processes
        self.closed = self.aborted = False
        self.users = 0
        self.device = hardware.device
        self.members = [{"host": rank // cluster.per_machine} for rank in range(self.size)]
        self.coordinators, self._groups = {}, {}
        self._collectives = SimulatedCollectives(self, hardware, cluster)
        self.everyone = self.group((tuple(range(self.size)),))

    @property
    def checkpoints(self) -> Any:
        raise NotImplementedError("a dry run saves no checkpoints")

    def group(self, partition: Partition) -> RankGroup:
        if partition not in self._groups:
            group = SimulatedGroup(self, next(ranks for ranks in partition if self.rank in ranks))
            self._groups[partition] = group
            self.coordinators[group] = SimulatedCoordinator(self, group, self._collectives)
        return self._groups[partition]

    def all_gather_object(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value)) for _ in range(self.size)]

    def announce(self, reason: str) -> None:
        """Do nothing: nobody waits."""

    def close(self) -> None:
        """Do nothing: there are no process groups."""


class SimulatedCollective(Transfer):
    """Collective with the copies between host and device that belong to it; never reordered or cancelled."""

    def __init__(self, label: str, transfers: Sequence[SimulatedTransfer]) -> None:
        self.label, self.transfers = label, transfers

    @property
    def done(self) -> bool:
        return all(transfer.done for transfer in self.transfers)

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait()

    def prioritize(self) -> None:
        """Do nothing: collectives keep their order."""

    def cancel(self) -> None:
        self.wait()


class SimulatedCollectives(Collectives):
    """Collectives that take the time of their bytes."""

    def __init__(self, world: World, hardware: SimulatedHardware, cluster: Cluster) -> None:
        super().__init__(world)
        self.hardware, self.cluster = hardware, cluster
        self._after: list[SimulatedTransfer] = []
        """Read from disk that the next collective waits for."""

    def begin_after(self, read: Transfer) -> None:
        assert isinstance(read, SimulatedTransfer), f"{read} is not simulated"
        self._after = [read]

    def all_gather(
        self, group: RankGroup, own: torch.Tensor, whole: torch.Tensor, bounds: Bounds, *, in_order: bool = False
    ) -> Transfer:
        up = self.hardware.up
        if not self.hardware.has_gpu and not in_order:
            up.run(own.nbytes, "a shard")  # the calling thread copies it
        return self._begin("an all-gather", own, whole, [(group, whole.nbytes)])

    def gather_to(
        self,
        group: RankGroup,
        own: torch.Tensor,
        whole: torch.Tensor | None,
        bounds: Bounds,
        ranks: Sequence[int],
        *,
        in_order: bool = False,
    ) -> Transfer:
        raise NotImplementedError("all simulated processes request the same chunks")

    def reduce_scatter(
        self,
        group: RankGroup,
        whole: torch.Tensor | None,
        target: torch.Tensor,
        bounds: Bounds,
        ranks: Sequence[int],
    ) -> Transfer:
        return self._begin("a reduce-scatter", whole, target, [(group, bounds[-1] * target.dtype.itemsize)])

    def hierarchical_reduce_scatter(
        self,
        levels: Levels,
        whole: torch.Tensor | None,
        target: torch.Tensor,
        bounds: Bounds,
        ranks: Sequence[int],
        replicas: Sequence[int],
    ) -> Transfer:
        sums = levels.part_bounds(bounds)[-1] * sum_dtype(target.dtype).itemsize
        stages = [(levels.shard, bounds[-1] * target.dtype.itemsize), (levels.replicate, sums)]
        return self._begin("a reduce-scatter in two levels", whole, target, stages)

    def close(self) -> None:
        """Do nothing: there are no threads and streams."""

    def _begin(
        self,
        label: str,
        source: torch.Tensor | None,
        target: torch.Tensor,
        stages: Sequence[tuple[RankGroup, int]],
    ) -> Transfer:
        """Begin a collective after the copy of `source` to the device, and before that of the result to `target`.

        Each of the `stages` gathers or scatters that many bytes in a group.
        """
        hardware = self.hardware
        transfers, self._after = self._after, []
        if hardware.has_gpu and source is not None and hardware.on_host(source):
            transfers.append(hardware.up.begin(source.nbytes, label))
        sent_bytes, seconds = 0, 0.0
        for group, nbytes in stages:
            sent = nbytes * (group.size - 1) // group.size
            sent_bytes += sent
            seconds += self.cluster.seconds(group.ranks, sent) if group.size > 1 else 0.0
        after = transfers[-1] if transfers else None
        if sent_bytes:
            transfers.append(hardware.collectives.begin(sent_bytes, label, after=after, seconds=seconds))
        if hardware.has_gpu and hardware.on_host(target):
            after = transfers[-1] if transfers else None
            transfers.append(hardware.down.begin(target.nbytes, label, after=after))
        return SimulatedCollective(label, transfers) if transfers else CompletedTransfer(label)
