"""Trainers for comparison: plain PyTorch, FSDP2 with CPU offload, DeepSpeed if it is installed."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import patrickstar as ps
from gpu_stages.shapes import build_on_meta, materialize
from patrickstar.testing import ReferenceTrainer

if TYPE_CHECKING:
    from gpu_stages.trainer import Run

Step = Callable[[torch.Tensor], torch.Tensor]
StepAndClose = tuple[Step, Callable[[], None]]
OPTIONS = ps.AdamW()
FUSED = partial(torch.optim.AdamW, lr=OPTIONS.lr, weight_decay=OPTIONS.weight_decay, fused=True)
"""PyTorch's fused AdamW with the defaults of ours."""


def sum_of(losses: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of a step from those of its backwards."""
    return torch.stack(losses).float().sum()


def clipped_step(
    run: "Run", model: Any, optimizer: Any, params: list[nn.Parameter], backward: Callable[[torch.Tensor], object]
) -> Step:
    """Return a step in parts, whose gradients PyTorch clips."""

    def step(ids: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in ids.chunk(run.parts):
            loss = model(input_ids=part, labels=part).loss / run.parts
            backward(loss)
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(params, run.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return sum_of(losses)

    return step


def no_close() -> None:
    """Do nothing: there is nothing to close."""


def plain(run: "Run") -> StepAndClose:
    """Return a step of plain PyTorch in the same mixed precision, with its fused AdamW over fp32 master parameters."""
    model = materialize(build_on_meta(run.model, run.checkpointing), torch.device(run.device))
    trainer = ReferenceTrainer(model, ps.Config(device=run.device, optimizer=FUSED))
    # PyTorch clips: the reference's way is exact, and waits for every parameter.
    masters = list(trainer.masters.values())
    return clipped_step(run, trainer, trainer.optimizer, masters, trainer.backward), no_close


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the transformer layers of a causal language model."""
    body: Any = model.model if hasattr(model, "model") else model.transformer
    return list(body.layers if hasattr(body, "layers") else body.h)


def fsdp2(run: "Run") -> StepAndClose:
    """Return a step of FSDP2 on one device; on a GPU with fp32 parameters, gradients and states on the host."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cuda = run.device != "cpu"
    store = tempfile.mktemp(prefix="gpu-fsdp2-")
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    mesh = init_device_mesh("cuda" if cuda else "cpu", (1,))
    model = materialize(build_on_meta(run.model, run.checkpointing), torch.device("cpu"))
    policy: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if cuda else OffloadPolicy(),
    }
    for layer in layers_of(model):
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    params = list(model.parameters())
    return clipped_step(run, model, FUSED(params), params, torch.Tensor.backward), dist.destroy_process_group


def deepspeed(run: "Run") -> StepAndClose:
    """Return a step of DeepSpeed ZeRO-3 with parameters and optimizer on the host."""
    import deepspeed

    on_host = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": run.batch // run.parts,
        "gradient_accumulation_steps": run.parts,
        "gradient_clipping": run.max_norm,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": OPTIONS.lr, "weight_decay": OPTIONS.weight_decay}},
        "zero_optimization": {"stage": 3, "offload_param": on_host, "offload_optimizer": on_host},
    }
    model = materialize(build_on_meta(run.model, run.checkpointing), torch.device("cpu"))
    trainer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(ids: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in (parts := ids.chunk(run.parts)):
            loss = trainer(input_ids=part, labels=part).loss
            trainer.backward(loss)
            trainer.step()
            losses.append(loss.detach() / len(parts))
        return sum_of(losses)

    return step, no_close


PEERS: dict[str, Callable[["Run"], StepAndClose]] = {"plain": plain, "fsdp2": fsdp2, "deepspeed": deepspeed}
