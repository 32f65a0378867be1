"""Processes of a cluster: nodes, GPUs of each node, and how computation and model data are divided among them."""

from dataclasses import dataclass

from patrickstar.errors import ConfigError


@dataclass(frozen=True)
class DataParallelGroup:
    """Processes that compute with the same part of the model, on different data.

    Attributes:
        shards: Number of these processes in one replica, which together gather each parameter.
        replicas: Number of replicas. Each process owns a part of 1 / (shards x replicas).
        nodes: Number of nodes of a replica that have such processes.
    """

    shards: int
    replicas: int
    nodes: int = 1


@dataclass(frozen=True)
class Mesh:
    """Processes of a cluster, one per GPU, numbered node by node.

    Attributes:
        nodes: Number of equal machines.
        gpus: Number of processes per node.
        tp: Size of tensor-parallel groups: consecutive processes that divide the matrices of each layer.
        ep: Size of expert-parallel groups: consecutive processes that divide the experts of each layer. Tensor-parallel
            groups are within them.
        replica_nodes: Nodes of a replica. If there are several replicas, each has a copy of the parameters, and gathers
            do not leave it.
    """

    nodes: int = 1
    gpus: int = 1
    tp: int = 1
    ep: int = 1
    replica_nodes: int = 1

    def __post_init__(self) -> None:
        sizes = f"nodes={self.nodes}, gpus={self.gpus}, tp={self.tp}, ep={self.ep}, replica_nodes={self.replica_nodes}"
        if min(self.nodes, self.gpus, self.tp, self.ep, self.replica_nodes) < 1:
            raise ConfigError(f"{sizes}: each must be at least 1")
        if self.nodes % self.replica_nodes:
            raise ConfigError(f"replica_nodes={self.replica_nodes} does not divide the {self.nodes} nodes")
        if self.gpus % self.tp:
            raise ConfigError(
                f"tp={self.tp} does not divide the {self.gpus} GPUs of a node; try tp={_divisors(self.gpus)}"
            )
        if self.ep == 1:
            return
        if self.processes % self.ep:
            raise ConfigError(
                f"ep={self.ep} does not divide the {self.processes} processes; try ep={_divisors(self.processes)}"
            )
        if not one_divides_the_other(self.gpus, self.ep):
            raise ConfigError(
                f"ep={self.ep} must divide the {self.gpus} GPUs of a node or be a multiple of them, so that groups "
                "consist of parts of a node, or of whole nodes"
            )
        replica = self.replica_nodes * self.gpus
        if not one_divides_the_other(replica, self.ep):
            raise ConfigError(f"ep={self.ep}, replicas of {replica} processes: one must divide the other")
        if self.ep % self.tp:
            raise ConfigError(
                f"ep={self.ep} must be a multiple of tp={self.tp}: the processes of a tensor-parallel group have the "
                "same tokens, and a group that shares an expert's gradients would count them twice"
            )

    @property
    def processes(self) -> int:
        """Number of all processes."""
        return self.nodes * self.gpus

    @property
    def batches(self) -> int:
        """Number of distinct batches: tensor-parallel processes share one."""
        return self.processes // self.tp

    @property
    def dense(self) -> DataParallelGroup:
        """Group of every parameter that is not an expert's."""
        return DataParallelGroup(
            self.replica_nodes * self.gpus // self.tp, self.nodes // self.replica_nodes, self.replica_nodes
        )

    @property
    def experts(self) -> DataParallelGroup:
        """Group of the experts of one process: processes / ep have the same."""
        if self.ep == 1:
            return self.dense
        shards = max(1, self.replica_nodes * self.gpus // self.ep)
        nodes = self.replica_nodes if self.ep <= self.gpus else shards
        return DataParallelGroup(shards, self.processes // self.ep // shards, nodes)

    @property
    def expert_nodes(self) -> int:
        """Number of nodes of one expert-parallel group."""
        return max(1, self.ep // self.gpus)

    @property
    def lockstep(self) -> bool:
        """True if operators contain collectives, so that processes follow one plan instead of negotiating."""
        return self.tp > 1 or self.ep > 1


ONE_PROCESS = Mesh()
"""Mesh of a single process."""


def one_divides_the_other(first: int, second: int) -> bool:
    """Return whether groups of these sizes consist of whole groups of the other size, or of parts of one."""
    return first % second == 0 or second % first == 0


def _divisors(number: int) -> str:
    found = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(found[:-1]) + " or " + found[-1] if len(found) > 1 else found[0]
