"""Measure steps of tensor- and expert-parallel models over gloo against FSDP2 with the same mesh and plan.

python benchmarks/mesh_time.py [--rounds 11] [--batch 1] [--sequence 256] [--meshes tp ep]
Four processes. "tp": a Llama of 33 million parameters, two tensor-parallel groups with different batches. "ep": a
Mixtral of 40 million parameters with eight experts, shared out over all processes. Steps of the engine, which has the
whole machine as budget, alternate with steps of PyTorch's `fully_shard` as in `data_parallel.py`.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from data_parallel import Fsdp, launch, pair_cells, time_pairs
from report import options, publish
from torch import nn

import patrickstar as ps
from patrickstar._distributed.process_group import World
from patrickstar.integrations._meshes import Meshes, MeshSizes, meshes
from patrickstar.integrations.transformers import parallelize

SIZES = {"tp": MeshSizes(4, tp=2), "ep": MeshSizes(4, ep=4)}
NAMES = {"tp": "Llama, dp 2 x tp 2", "ep": "Mixtral, dp 4, ep 4"}
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


def sharded(model: Any, built: Meshes) -> Iterator[tuple[nn.Module, Any]]:
    """Yield what FSDP2 shards, and over which mesh. That of the experts has one more dimension, of size 1."""
    if built.ep is not None:
        copies = built.ep._get_root_mesh()["dp"]
        yield from ((layer.mlp.experts, copies) for layer in model.model.layers)
    yield from ((block, built.data) for block in (*model.model.layers, model))


def worker(given: argparse.Namespace) -> dict[str, Any]:
    """Train in this process; return the steps, parameters and coordination steps of each model."""
    dist.init_process_group("gloo")
    results = {}
    for kind in given.meshes:
        built = meshes(SIZES[kind], "cpu")
        generator = torch.Generator().manual_seed(built.data.get_local_rank())
        ids = torch.randint(0, SHAPE["vocab_size"], (given.batch, given.sequence), generator=generator)
        config = ps.Config(device="cpu", precision="bf16", optimizer=ps.AdamW(lr=1e-4))
        world = World.find(torch.device("cpu"))
        engine, model = ps.Engine(partial(build, kind, built), config, world=world, mesh=built.data), build(kind, built)
        pairs = time_pairs(Fsdp(model, sharded(model, built)), engine, ids, given.rounds)
        numel = sum(param.numel() for param in model.parameters())
        results[kind] = (pairs, numel, engine.stats.last.rounds)
        engine.close(keep=False)
    dist.destroy_process_group()
    return results


def main() -> None:
    given = options(__doc__, batch=1, sequence=256, rounds=11, meshes=list(SIZES), worker=False)
    if given.worker:
        print(json.dumps(worker(given)))
        return
    rows = [
        {"model": NAMES[kind], "parameters": f"{numel:,}"}
        | pair_cells(pairs, "MB", lambda nbytes: f"{nbytes / 1e6:.1f}")
        | {"coordination steps": str(rounds)}
        for kind, (pairs, numel, rounds) in launch(4, __file__)[0].items()
    ]
    publish(
        "mesh_time",
        "cpu",
        f"bf16, {given.batch} x {given.sequence} tokens per batch, gloo, 4 processes. Seconds per step if everything "
        f"fits, alternating with FSDP2 (`fully_shard`) of the same mesh and plan in the same processes. MB: what all "
        f"processes send per step on the loopback device, with the collectives of the operators.",
        rows,
    )


if __name__ == "__main__":
    main()
