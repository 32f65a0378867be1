"""Measure steps of tensor- and expert-parallel models over gloo against FSDP2 with the same mesh and plan.

python benchmarks/mesh_time.py [--rounds 11] [--batch 1] [--sequence 256] [--meshes tp ep]
Four processes. "tp": a Llama of 33 million parameters, two tensor-parallel groups with different batches. "ep": a
Mixtral of 40 million parameters with eight experts, shared out over all processes. Steps of the engine, which has the
whole machine as budget, alternate with steps of PyTorch's `fully_shard` (same blocks, bf16 operators and reductions,
fp32 parameters, fused AdamW) in the same processes; the ratio is the median over pairs.
"""

import argparse
import json
import os
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from data_parallel import launch, timed
from report import publish
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import patrickstar as ps
from patrickstar._distributed.process_group import World
from patrickstar.integrations._meshes import Meshes, MeshSizes, meshes
from patrickstar.integrations.transformers import parallelize

SIZES = {"tp": MeshSizes(4, tp=2), "ep": MeshSizes(4, ep=4)}
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "use_cache": False,
}


def build(kind: str, built: Meshes) -> nn.Module:
    torch.manual_seed(0)
    model: Any
    if kind == "tp":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, intermediate_size=1536))
    else:
        experts = {"intermediate_size": 384, "num_local_experts": 8, "num_experts_per_tok": 2}
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SHAPE, **experts))
    parallelize(model, tp=built.tp, ep=built.ep)
    return model.train()


class Ours:
    """Trainer on the engine."""

    def __init__(self, kind: str, built: Meshes) -> None:
        config = ps.Config(device="cpu", optimizer=ps.AdamW(lr=1e-4))
        world = World.find(torch.device("cpu"))
        self.engine = ps.Engine(partial(build, kind, built), config, world=world, mesh=built.data)

    def step(self, ids: torch.Tensor) -> float:
        loss = self.engine(input_ids=ids, labels=ids).loss
        self.engine.backward(loss)
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad()
        return loss.item()


class Fsdp:
    """Trainer on PyTorch's FSDP2. The mesh of the experts has one more dimension, of size 1, for their sharding."""

    def __init__(self, kind: str, built: Meshes) -> None:
        self.model: Any = build(kind, built)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        if built.ep is not None:
            copies = built.ep._get_root_mesh()["dp"]
            for layer in self.model.model.layers:
                fully_shard(layer.mlp.experts, mesh=copies, mp_policy=policy)
        for block in (*self.model.model.layers, self.model):
            fully_shard(block, mesh=built.data, mp_policy=policy)
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for param in self.model.parameters():
            by_mesh.setdefault(param.device_mesh if isinstance(param, DTensor) else None, []).append(param)
        self.optimizers = [torch.optim.AdamW(params, lr=1e-4, fused=True) for params in by_mesh.values()]

    def step(self, ids: torch.Tensor) -> float:
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()


def worker(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    results = {}
    for kind in options.meshes:
        built = meshes(SIZES[kind], "cpu")
        generator = torch.Generator().manual_seed(built.data.get_local_rank())
        ids = torch.randint(0, SHAPE["vocab_size"], (options.batch, options.sequence), generator=generator)
        ours, fsdp = Ours(kind, built), Fsdp(kind, built)
        for trainer in (ours, fsdp):
            for _ in range(3):
                timed(trainer, ids)
        results[kind] = [(timed(fsdp, ids), timed(ours, ids)) for _ in range(options.rounds)]
        results[f"{kind} parameters"] = sum(param.numel() for param in fsdp.model.parameters())
        results[f"{kind} rounds"] = ours.engine.stats.last.rounds
        ours.engine.close(keep=False)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(results))
    else:
        print("{}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--meshes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    result, rows = launch(4, __file__)[0], []
    for kind in options.meshes:
        pairs = result[kind]
        ratios = sorted(fsdp[0] / ours[0] for fsdp, ours in pairs)
        count = result[f"{kind} parameters"]
        rows.append(
            [
                {"tp": "Llama, dp 2 x tp 2", "ep": "Mixtral, dp 4, ep 4"}[kind],
                f"{count:,}",
                f"{median(fsdp[0] for fsdp, _ in pairs):.3f}",
                f"{median(ours[0] for _, ours in pairs):.3f}",
                f"{median(ratios):.3f}",
                f"{ratios[0]:.3f} - {ratios[-1]:.3f}",
                f"{median(fsdp[1] for fsdp, _ in pairs) / 1e6:.1f}",
                f"{median(ours[1] for _, ours in pairs) / 1e6:.1f}",
                str(result[f"{kind} rounds"]),
            ]
        )
    publish(
        "mesh_time",
        "cpu",
        f"bf16, {options.batch} x {options.sequence} tokens per batch, gloo, 4 processes. Seconds per step if "
        f"everything fits, alternating with FSDP2 (`fully_shard`) of the same mesh and plan in the same processes. MB: "
        f"what all processes send per step on the loopback device, with the collectives of the operators.",
        [
            *("model", "parameters", "FSDP2 s", "engine s", "ratio (median of pairs)", "range"),
            *("FSDP2 MB", "engine MB", "coordination steps"),
        ],
        rows,
    )


if __name__ == "__main__":
    main()
