"""Iterations that hold gathered parameters, and evaluations that are planned, on some processes or all: same bits."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laws.residents import PLENTY, holds
from laws.test_planned_evaluations import generated, gpt2
from probes import manager_of, tracer_of
from torch import nn
from toys import inputs, layers, mean_square, train

import patrickstar as ps
from patrickstar._distributed.process_group import World

from . import ranks
from .test_exactness import CPU, compare, random_config, random_shape


def token_batches(draw: random.Random, count: int) -> list[tuple[torch.Tensor]]:
    """Return batches of this process, of one shape, or of two by turns."""
    generator, lengths = torch.Generator().manual_seed(dist.get_rank()), draw.choice([[4], [4, 5]])
    return [(torch.randint(0, 11, (2, lengths[k % len(lengths)]), generator=generator),) for k in range(count)]


def evaluating(data: list[Any], max_norm: float | None, trainer: Any) -> list[torch.Tensor]:
    """Train with evaluations between steps and within them, some of them of one process alone."""
    results: list[torch.Tensor] = []

    def evaluate(batch: Any) -> None:
        with torch.no_grad():
            results.append(trainer.eval()(*batch).clone())
        trainer.train()

    for number, batch in enumerate(data):
        for _ in range((number + dist.get_rank()) % 3):
            evaluate(batch)
        loss = trainer(*batch)
        if number % 3 == 2:
            evaluate(batch)
        trainer.backward(loss)
        evaluate(batch)
        if max_norm is not None:
            results.append(trainer.clip_grad_norm_(max_norm))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        results.append(loss.detach().clone())
    return results


def writing(data: list[Any], trainer: Any) -> list[torch.Tensor]:
    """Write to parameters between forward and backward, other values in each process: those of the owners count."""
    results = []
    for number, batch in enumerate(data):
        first = trainer(*batch).detach().clone()
        if number > 3:
            with torch.no_grad():
                for param in list(trainer.module.parameters())[number % 2 :: 3]:
                    param.mul_(0.75)
        loss = trainer(*batch)
        trainer.backward(loss)
        trainer.optimizer.step()
        results += [first, loss.detach().clone()]
    return results


def several(data: list[Any], trainer: Any) -> list[torch.Tensor]:
    """Run more backwards than the trace has, from the fifth step on."""
    results = []
    for number, batch in enumerate(data):
        for again in range(2 if number > 4 else 1):
            loss = trainer(*batch)
            trainer.backward(loss * (1 + again))
            results.append(loss.detach().clone())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return results


def script_of(draw: random.Random) -> Callable[[Any], list[torch.Tensor]]:
    data, max_norm = token_batches(draw, 9), draw.choice([None, 0.1])
    loop = {"accumulation": draw.choice([1, 1, 1, 3]), "reduce_once": draw.random() < 0.5}
    return draw.choice(
        [
            lambda trainer: train(trainer, data, max_norm=max_norm, **loop),
            lambda trainer: evaluating(data, max_norm, trainer),
            lambda trainer: writing(data, trainer),
            lambda trainer: several(data, trainer),
        ]
    )


@ranks.joined
def resident(seeds: list[int], replicas: int = 1) -> None:
    """Train random models of which all fits, on some processes evicted at every access; runs in each process."""
    for seed in seeds:
        draw = random.Random(seed)
        shape, config, script = random_shape(draw), random_config(draw, device_memory=PLENTY), script_of(draw)
        evicts = draw.choice([[], [], [0], [1]])
        print(f"seed {seed}: {shape}, {config!r}, {evicts} evict", flush=True)
        compare(shape.build, config, script, seed, replicas, evict_everything=dist.get_rank() in evicts)


@pytest.mark.long("ranks of four processes start, and train nine steps with each model twice")
@pytest.mark.parametrize("size, replicas", [(2, 1), pytest.param(4, 1, marks=pytest.mark.slow), (4, 2)])
def test_bits_of_the_reference(size, replicas):
    ranks.run(size, resident, seeds=ranks.seeds(24, 100 * size + 10 * replicas), replicas=replicas)


@ranks.in_processes(2)
def test_gathered_chunks_are_held_until_they_are_reduced():
    """Hold chunks from the third iteration on: one gather and one reduction each, and no coordination for others."""
    config = ps.Config(device="cpu", precision="fp32", chunk_size=1 << 10, device_memory=PLENTY)
    engine = ps.Engine(lambda: layers(8, 12), config, world=World(CPU), meter=ps.testing.NoMeter(), poison=True)
    found = []
    for batch in inputs(5, 8):
        loss = mean_square(engine(*batch))
        found.append(holds(engine))
        engine.backward(loss)
        assert holds(engine) == 0, "each was reduced"
        engine.optimizer.step()
    count, nbytes = engine.layout.chunk_count, sum(chunk.compute_bytes for chunk in engine.layout.chunks)
    assert count > 1 and found == [0, 0, count, count, count]
    last = engine.stats.last
    assert last.gathered_bytes == last.reduced_bytes == nbytes // 2
    with torch.no_grad():
        outputs = [engine.eval()(*inputs(1, 8)[0]) for _ in range(4)]
    assert torch.equal(outputs[0], outputs[3]) and holds(engine) == 0
    engine.close(keep=False)


@ranks.in_processes(2)
def test_evaluations_that_do_not_fit_are_planned():
    """Gather ahead in evaluations and in the tokens of a generation, one of which a process runs alone."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({"gpt": gpt2()})
    expected = generated(plain["gpt"])
    chunk_bytes = 64 << 10
    config = ps.Config(device="cpu", precision="fp32", chunk_size=chunk_bytes, device_memory=12 * chunk_bytes)
    engine = ps.Engine(gpt2, config, world=World(CPU), meter=ps.testing.NoMeter(), poison=True)
    manager, prefetches = manager_of(engine), []
    start_fetch = manager.transfers.start_fetch

    def fetch(chunk, urgent):
        prefetches.append(not urgent)
        start_fetch(chunk, urgent)

    manager.transfers.start_fetch = fetch
    for _ in range(2):
        ps.testing.assert_same_bits(expected, generated(engine.module), "tokens")
    assert tracer_of(engine).evaluation_traces
    prefetches.clear()
    ps.testing.assert_same_bits(expected, generated(engine.module), "tokens of the third generation")
    assert sum(prefetches) > len(prefetches) / 2, "most gathers begin before an operator needs them"
    if dist.get_rank() == 0:
        ps.testing.assert_same_bits(expected, generated(engine.module), "tokens of one process")
    ids = torch.randint(1, 256, (2, 16))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.optimizer.step()
    engine.close(keep=False)
