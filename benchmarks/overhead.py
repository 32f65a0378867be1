"""Processor time of a step beside plain PyTorch and FSDP2: a Llama of 16 tiny layers, fp32, one thread, one process.

python benchmarks/overhead.py [--layers 16] [--width 32] [--rounds 15] [--profile]
The layers are so small that a step takes little but the time of Python and of operator calls. Steps of all sides
alternate; figures are medians. "half" gives the engine a device budget for half of the parameters beside the largest
working set, so that chunks move within memory. `--profile` prints the functions of a resident step by their own time.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from report import publish
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import patrickstar as ps
from patrickstar import Engine
from patrickstar.testing import NoMeter

VOCABULARY, SEQUENCE = 64, 8


def build(options: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).train()


class Side:
    """One trainer. evaluation: forwards without gradients in place of steps."""

    def __init__(self, model: Any, optimizer: Any, backward: Callable[[torch.Tensor], None]) -> None:
        self.model, self.optimizer, self.backward = model, optimizer, backward

    def step(self, ids: torch.Tensor) -> None:
        self.backward(self.model(input_ids=ids, labels=ids).loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, ids: torch.Tensor) -> None:
        with torch.no_grad():
            self.model(input_ids=ids, labels=ids)


def engine_side(options: argparse.Namespace, **more: Any) -> Side:
    config = ps.Config(device="cpu", precision="fp32", chunk_size=16 * 1024, **more)
    # The memory of this process says nothing about so small a budget.
    meter = {"meter": NoMeter()} if more else {}
    engine = Engine(lambda: build(options), config, **meter)
    return Side(engine, engine.optimizer, engine.backward)


def sides(options: argparse.Namespace) -> dict[str, Side]:
    plain, sharded = build(options), build(options)
    parameter_bytes = sum(param.nbytes for param in plain.parameters())
    made = {
        "plain PyTorch": Side(plain, torch.optim.AdamW(plain.parameters()), torch.Tensor.backward),
        "engine, resident": engine_side(options),
        "engine, half": engine_side(options, device_memory=parameter_bytes // 2 + 48 * 1024),
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    made["FSDP2"] = Side(sharded, torch.optim.AdamW(sharded.parameters()), torch.Tensor.backward)
    return made


def measure(run: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median processor seconds of each function; they run by turns."""
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(3 + rounds):
        for name, call in run.items():
            start = time.process_time()
            call()
            seconds[name].append(time.process_time() - start)
    return {name: median(values[3:]) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = sides(options)
    ids = torch.randint(0, VOCABULARY, (1, SEQUENCE))
    parameters = sum(1 for _ in made["plain PyTorch"].model.parameters())
    steps = measure({name: lambda side=side: side.step(ids) for name, side in made.items()}, options.rounds)
    moved = made["engine, half"].model.stats.last
    forwards = measure({name: lambda side=side: side.evaluate(ids) for name, side in made.items()}, options.rounds)
    plain_s, plain_forward_s = steps["plain PyTorch"], forwards["plain PyTorch"]
    rows = [
        [
            name,
            f"{steps[name] * 1e3:.1f}",
            f"{steps[name] / plain_s:.2f}",
            f"{(steps[name] - plain_s) / parameters * 1e6:.0f}",
            f"{forwards[name] * 1e3:.1f}",
            f"{forwards[name] / plain_forward_s:.2f}",
        ]
        for name in made
    ]
    publish(
        "overhead",
        "cpu",
        f"Processor time of a step and of an evaluation without gradients; a Llama of {options.layers} layers, width "
        f"{options.width}, {parameters} parameters, {SEQUENCE} tokens, fp32, one thread; medians of {options.rounds} "
        f"alternating rounds. Limits: 1.3 times plain PyTorch and 65 us per parameter if everything is resident, "
        f"200 us if half of the parameters fit ({moved.h2d_bytes:,} bytes fetched per step), 1.1 for an evaluation.",
        ["", "step ms", "of plain", "us per parameter above plain", "evaluation ms", "of plain"],
        rows,
    )
    if options.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(20):
            made["engine, resident"].step(ids)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
