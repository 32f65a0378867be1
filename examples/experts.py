"""Train a small Mixtral whose experts are divided among all processes, within a memory budget.

torchrun --nproc-per-node 4 examples/experts.py [--tp 2] [--ep 4] [--steps 60] [--device-memory 32MiB]

Each process holds a part of the experts (--ep processes together hold all); tokens are sent to the processes of their
experts and back. The rest of the model is sharded over processes with different batches, as in data parallelism. With
--tp 2, two processes share a batch, and each computes half of the attention heads.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
from transformers import MixtralConfig, MixtralForCausalLM

import patrickstar as ps
from patrickstar.integrations.transformers import parallelize


def byte_blocks(length: int, count: int) -> torch.Tensor:
    """Return at most `count` blocks of Python's sources, each of `length` bytes; one byte is one token."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > length * count:
            break
    tokens = torch.frombuffer(text, dtype=torch.uint8).long()
    return tokens[: len(tokens) // length * length].view(-1, length)[:count]


def main(options: Sequence[str] | None = None) -> tuple[list[float], int]:
    """Train, and print losses and memory figures.

    Returns:
        The mean loss of each step, and the peak of chunks and other tensors on the device of any process, in bytes.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="processes that share a batch")
    parser.add_argument("--ep", type=int, help="processes that together hold all experts; default: all processes")
    parser.add_argument("--steps", type=int, default=60)
    # Libraries need 66 MiB of a GPU's budget.
    smallest = "128MiB" if torch.cuda.is_available() else "32MiB"
    parser.add_argument("--device-memory", default=smallest, help="budget of each process")
    args = parser.parse_args(options)

    ps.join()
    rank, world = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ep = args.ep or world
    mesh = init_device_mesh(device, (world // args.tp, args.tp), mesh_dim_names=("dp_shard", "tp"))
    experts = init_device_mesh(device, (world // ep, ep), mesh_dim_names=("copies", "ep"))

    torch.manual_seed(0)  # the same weights in all processes
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=16,
            max_position_embeddings=128,
            output_router_logits=True,  # the loss balances the experts
            use_cache=False,
        )
    )
    parallelize(model, tp=mesh["tp"], ep=experts["ep"])

    config = ps.Config(device_memory=args.device_memory, optimizer=ps.AdamW(lr=1e-3))
    with ps.initialize(model, config, mesh=mesh["dp_shard"]) as (engine, optimizer):
        model_data = engine.layout.model_data_bytes / 2**20
        if rank == 0:
            print(
                f"{world} processes, each with {model_data:.1f} MiB of model data and a budget of {args.device_memory}"
            )
        data = byte_blocks(length=128, count=4000)
        sampler = DistributedSampler(data, engine.data_size, engine.data_rank)
        batches = DataLoader(data, batch_size=2, sampler=sampler, drop_last=True)
        losses = []
        for step, ids in enumerate(islice(batches, args.steps), start=1):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(engine.average(loss.item()))
            if rank == 0 and (step % 10 == 0 or step in (1, args.steps)):
                print(f"step {step}: loss {losses[-1]:.3f}")
        stats = engine.stats.total
    peaks = [(0, 0)] * world
    dist.all_gather_object(peaks, (stats.device_peak_model_bytes, stats.device_peak_non_model_bytes))
    chunks, others = map(max, zip(*peaks, strict=True))
    if rank == 0:
        print(f"peaks on a device: {chunks / 2**20:.1f} MiB of chunks, {others / 2**20:.1f} MiB of other tensors")
    return losses, max(map(sum, peaks))


if __name__ == "__main__":
    main()
