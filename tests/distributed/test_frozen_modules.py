"""Law 1 for several processes and a frozen module: its shards are gathered for each forward, and change no bit."""

import random
from functools import partial

import pytest
import torch
from laws.test_frozen_modules import build, distill

import patrickstar as ps
from patrickstar import testing
from patrickstar._distributed.process_group import World
from patrickstar._engine.engine import Engine

from . import ranks
from .reference import AveragingTrainer


@pytest.mark.parametrize("seeds", [ranks.seeds(6)])
@ranks.in_processes(2)
def test_bits_of_plain_pytorch(seeds):
    """Train towards a teacher's outputs."""
    for seed in seeds:
        draw = random.Random(seed)
        order, precision = draw.choice(["before", "between", "mixed"]), draw.choice(["bf16", "fp32"])
        config = ps.Config(device="cpu", precision=precision, chunk_size=draw.choice([1100, 4096, "auto"]))
        print(f"seed {seed}: {config!r}, {order}", flush=True)
        reference = AveragingTrainer(build(3, seed), config)
        plain = testing.ReferenceTrainer(build(4, seed + 100).requires_grad_(False), config)
        expected = distill(reference, torch.no_grad()(plain.__call__), order)
        options = {"meter": testing.NoMeter(), "poison": True, "evict_everything": draw.random() < 0.5}
        frozen = {"teacher": build(4, seed + 100)}
        engine = Engine(build(3, seed), config, world=World(torch.device("cpu")), frozen=frozen, **options)
        found = distill(engine, partial(engine.call_frozen, "teacher"), order)
        testing.assert_same_bits(expected, found, "losses, norms and outputs")
        testing.assert_same_bits(reference.state_dict(), engine.state_dict(), "parameters")
        numel = sum(each.numel for each in engine.inspect().parameters if each.name.startswith("teacher."))
        assert numel < 0.8 * sum(param.numel() for param in frozen["teacher"].parameters()), "this rank's shards only"
        engine.close()
