"""Resources of a step: how long each is busy in the busiest process, linear in the shares of model data."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from patrickstar._perf_model.frozen_data import FrozenData
from patrickstar._perf_model.linear_program import Expression
from patrickstar._perf_model.machine_spec import Machine, Network
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.model_data import ModelDataShare
from patrickstar._perf_model.workload import Workload

MESSAGE_BYTES = 128
"""Bytes that a process sends to each other one in a coordination step (`_distributed/coordinator.py`)."""


@dataclass(frozen=True, eq=False)
class ChannelCost:
    """Busy seconds and amount of one resource for one process; seconds of shared resources count all of the node.

    `blocking_s`: seconds that computation waits for, in proportion to the tokens.
    """

    name: str
    seconds: Expression
    amount: Expression
    """Bytes or operations."""
    blocking_s: float = 0.0


def total(expressions: Sequence[Expression]) -> Expression:
    """Return the sum of expressions."""
    summed: Expression = np.sum(expressions, axis=0)
    return summed


def channels(
    work: Workload,
    machine: Machine,
    mesh: Mesh,
    model_data: Sequence[ModelDataShare],
    frozen: FrozenData | None,
    one: Expression,
    lock_free: bool = False,
) -> list[ChannelCost]:
    """Return the resources of a step.

    `model_data`: trained parameters. `lock_free`: without the states on disk, for which no step waits.
    """
    gpus, host = mesh.gpus, machine.host
    links = _links(work, machine, mesh, model_data, frozen, one)
    operations_s = (work.operations - work.thin_operations) / machine.matmul_rate(work.matrix_size)
    if work.experts is not None:
        rate = machine.matmul_rate(work.experts.matrix_size)
        operations_s += work.experts.imbalance * work.experts.operations / rate
    blocking_s = sum(link.blocking_s for link in links)
    compute = one * (operations_s + blocking_s)
    h2d_bytes, d2h_bytes = (
        total([data.h2d_bytes for data in model_data]),
        total([data.d2h_bytes for data in model_data]),
    )
    read_bytes = total([data.read_bytes(lock_free) for data in model_data])
    write_bytes = total([data.write_bytes(lock_free) for data in model_data])
    ram_bytes = total([data.ram_bytes for data in model_data])
    if frozen is not None:  # only read
        h2d_bytes = h2d_bytes + frozen.h2d_bytes
        read_bytes = read_bytes + frozen.read_bytes
        ram_bytes = ram_bytes + frozen.ram_bytes
    ram_bytes = ram_bytes + read_bytes + write_bytes
    on_device = total([data.device_update_bytes for data in model_data]) + one * work.other_bytes
    if machine.gpu is not None:
        compute = compute + on_device / machine.gpu.memory_bandwidth
    else:
        ram_bytes = ram_bytes + on_device
    h2d, d2h = machine.transfer_rates(gpus)
    memory = host.update_bandwidth(gpus, max(1, host.cores // gpus))
    found = [
        ChannelCost("compute", compute, one * work.all_operations, blocking_s),
        ChannelCost("host to device", h2d_bytes / h2d, h2d_bytes),
        ChannelCost("device to host", d2h_bytes / d2h, d2h_bytes),
        ChannelCost("host memory", ram_bytes * gpus / memory, ram_bytes),
    ]
    if machine.disk is not None:
        found.append(ChannelCost("disk read", read_bytes * gpus / machine.disk.read, read_bytes))
        found.append(ChannelCost("disk write", write_bytes * gpus / machine.disk.write, write_bytes))
    return found + links


def _links(
    work: Workload,
    machine: Machine,
    mesh: Mesh,
    model_data: Sequence[ModelDataShare],
    frozen: FrozenData | None,
    one: Expression,
) -> list[ChannelCost]:
    """Return the connections between GPUs of a node and between nodes."""
    found = []
    all_data: list[ModelDataShare | FrozenData] = [*model_data, *([] if frozen is None else [frozen])]
    imbalance = work.experts.imbalance if work.experts is not None else 1.0
    to_node, to_others = _exchanged_bytes(work, mesh)
    if mesh.gpus > 1:
        assert machine.links is not None and machine.links.gpu_gpu is not None
        gathered = sum(data.sent_in_node for data in all_data)
        blocking_s = (work.tensor_parallel_bytes + imbalance * to_node) / machine.links.gpu_gpu
        found.append(
            ChannelCost(
                "between GPUs",
                one * (gathered / machine.links.gpu_gpu + blocking_s),
                one * (gathered + work.tensor_parallel_bytes + to_node),
                blocking_s,
            )
        )
    if mesh.nodes > 1:
        assert machine.network is not None
        network, exchanged = machine.network, sum(data.sent_between_nodes for data in all_data)
        exchanges = work.experts.exchanges if work.experts is not None else 0
        blocking_s = imbalance * to_others * mesh.gpus / network.bandwidth
        blocking_s += exchanges * (mesh.expert_nodes - 1) * network.latency_s
        messages = work.working_sets * sum(data.messages_between_nodes for data in model_data)
        seconds = exchanged * mesh.gpus / network.bandwidth + messages * network.latency_s + blocking_s
        found.append(ChannelCost("between nodes", one * seconds, one * (exchanged + to_others), blocking_s))
        found.append(_coordination(work, network, mesh, one))
    return found


def _exchanged_bytes(work: Workload, mesh: Mesh) -> tuple[float, float]:
    """Return the bytes of routed tokens that a process sends inside its node, and to other nodes."""
    if work.experts is None or mesh.ep == 1:
        return 0.0, 0.0
    inside = (min(mesh.ep, mesh.gpus) - 1) / (mesh.ep - 1)
    return inside * work.experts.exchanged_bytes, (1 - inside) * work.experts.exchanged_bytes


def _coordination(work: Workload, network: Network, mesh: Mesh, one: Expression) -> ChannelCost:
    """Return the coordination steps: ring all-gathers of one message per process, one step before each gather.

    In lockstep there is one, which compares what processes did in the step.
    """
    steps = 1 if mesh.lockstep else 2 * work.working_sets
    messages = steps * (mesh.processes - 1)
    return ChannelCost("coordination", one * (messages * network.latency_s), one * (messages * MESSAGE_BYTES))
