"""Agreement of several processes on a layout and on buffers before they share a model."""

from collections.abc import Sequence
from importlib.metadata import version

import torch
from torch import nn

from patrickstar._distributed.coordinator import Coordinator
from patrickstar._distributed.data_mesh import DataMesh
from patrickstar._distributed.param_sharding import local_part
from patrickstar._distributed.process_group import Processes
from patrickstar._distributed.single_process import SingleProcess
from patrickstar._engine.param_init import make_layout
from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._layout.chunk_mapping import Layout, ParamSpec
from patrickstar._params.chunk_comm import ChunkComm
from patrickstar.config import Config


def negotiate_layout(
    world: Processes,
    mesh: DataMesh,
    module: nn.Module,
    params: Sequence[ParamSpec],
    config: Config,
    device_budget_bytes: int,
) -> Layout:
    """Return the common layout of all processes, with chunks that suit the smallest device.

    Raises:
        ConfigError: Versions, models or options differ; the message names the first difference.
    """
    facts = {
        "the version of PyTorch": torch.__version__,
        "the version of PatrickStar": version("patrickstar"),
        "the number of processes": world.size,
        "the mesh": [mesh.size, mesh.replicas],
        "precision": config.precision,
        "reduce_dtype": config.reduce_dtype,
        "chunk_size": config.chunk_size,
        "use of a disk": config.disk is not None,
        "optimizer": type(config.optimizer).__name__,
        "update": config.update and [type(config.update).__name__, config.update.model_dump(exclude={"log", "replay"})],
        "the optimizer's states": list(config.optimizer.states),
        "parameters": [
            [name, list(param.shape), str(param.dtype), param.requires_grad]
            for name, param in module.named_parameters()
        ],
        "buffers": [[name, list(buffer.shape), str(buffer.dtype)] for name, buffer in module.named_buffers()],
    }
    world.check_agreement(facts)
    budget_bytes = max(0, min(world.all_gather_object(device_budget_bytes)))
    layout = make_layout(list(params), config, budget_bytes)
    return layout.with_sizes({name: local_part(param).numel() for name, param in module.named_parameters()})


def broadcast_buffers(world: Processes, module: nn.Module, linked: bool) -> None:
    """Broadcast the buffers of rank 0. Parameters need no broadcast: each shard has one owner.

    If operators link processes, buffers may belong to one of them, such as its attention heads, and stay as they are.
    """
    if linked:
        return
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is None or not buffer.numel() or buffer.is_meta:  # in a dry run buffers have no values
                continue
            value = buffer.detach().to("cpu", copy=True).contiguous()
            world.broadcast(value.view(-1).view(torch.uint8), 0)
            if not torch.equal(value.view(-1).view(torch.uint8), buffer.detach().cpu().reshape(-1).view(torch.uint8)):
                owner._buffers[name] = value.to(buffer.device)


def chunk_comm(world: Processes, mesh: DataMesh, accelerator: TorchDevice | None, layout: Layout) -> ChunkComm | None:
    """Return the communication of a new engine with the other processes, if there are any."""
    if isinstance(world, SingleProcess):
        return None
    comm = ChunkComm(Coordinator.of(world, mesh.group(world), accelerator), mesh.levels(world))
    comm.transports.register(layout.chunks)
    return comm
