"""Processor time of a step beside plain PyTorch and FSDP2: a Llama of 16 tiny layers, fp32, one thread, one process.

python benchmarks/overhead.py [--layers 16] [--width 32] [--rounds 15]
The layers are so small that a step takes little but the time of Python and of operator calls. Steps of all sides
alternate; figures are medians. "half" gives the engine a device budget for half of the parameters beside the largest
working set, so that chunks move within memory.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from report import options, publish
from steps import Plain, alternating, train_step
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import patrickstar as ps
from patrickstar.testing import NoMeter

VOCABULARY, SEQUENCE = 64, 8


def build(given: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=given.width,
        intermediate_size=2 * given.width,
        num_hidden_layers=given.layers,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def evaluate(trainer: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        trainer(input_ids=ids, labels=ids)


def trainers(given: argparse.Namespace) -> dict[str, Any]:
    plain, sharded = build(given), build(given)
    config = ps.Config(device="cpu", precision="fp32", chunk_size=16 * 1024)
    half_bytes = sum(param.nbytes for param in plain.parameters()) // 2 + 48 * 1024
    made = {
        "plain PyTorch": Plain(plain, torch.optim.AdamW(plain.parameters())),
        "engine, resident": ps.Engine(partial(build, given), config),
        # The memory of this process says nothing about so small a budget.
        "engine, half": ps.Engine(
            partial(build, given), config.model_copy(update={"device_memory": half_bytes}), meter=NoMeter()
        ),
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for module in (*sharded.model.layers, sharded):
        fully_shard(module)
    return made | {"FSDP2": Plain(sharded, torch.optim.AdamW(sharded.parameters()))}


def main() -> None:
    given = options(__doc__, layers=16, width=32, rounds=15)
    torch.set_num_threads(1)
    made = trainers(given)
    ids = torch.randint(0, VOCABULARY, (1, SEQUENCE))
    parameters = sum(1 for _ in made["plain PyTorch"].model.parameters())

    def measure(call: Callable[..., object]) -> dict[str, float]:
        """Return the median processor seconds of a call for each trainer; they run by turns."""
        actions = {name: partial(call, trainer, ids) for name, trainer in made.items()}
        times = alternating(actions, given.rounds, 3, time.process_time)
        return {name: median(values) for name, values in times.items()}

    steps = measure(train_step)
    moved = made["engine, half"].stats.last
    forwards = measure(evaluate)
    plain_s, plain_forward_s = (seconds["plain PyTorch"] for seconds in (steps, forwards))
    publish(
        "overhead",
        f"Processor time of a step and of an evaluation without gradients; a Llama of {given.layers} layers, width "
        f"{given.width}, {parameters} parameters, {SEQUENCE} tokens, fp32, one thread; medians of {given.rounds} "
        f"alternating rounds. Limits: 1.3 times plain PyTorch and 65 us per parameter if everything is resident, "
        f"200 us if half of the parameters fit ({moved.h2d_bytes:,} bytes fetched per step), 1.1 for an evaluation.",
        [
            [
                name,
                *(f"{steps[name] * 1e3:.1f}", f"{steps[name] / plain_s:.2f}"),
                f"{(steps[name] - plain_s) / parameters * 1e6:.0f}",
                *(f"{forwards[name] * 1e3:.1f}", f"{forwards[name] / plain_forward_s:.2f}"),
            ]
            for name in made
        ],
        ["", "step ms", "of plain", "us per parameter above plain", "evaluation ms", "of plain"],
    )


if __name__ == "__main__":
    main()
