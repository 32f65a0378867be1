"""Training loops on the strict device that together use every copy, wait and order of an engine.

`removed_statements.py` runs it as a program, `python scenarios.py COUNT`: scenarios until one fails.
See [Note: removed statements] in `removed_statements.py`.
"""

import copy
import faulthandler
import gc
import itertools
import random
import sys
import tempfile
from typing import Any
from unittest import mock

import removal  # noqa: F401  First: without the statement that the environment names.
import strict_device
import torch
import toys
from seeded import engine_of, reference_of
from test_exactness import run_schedule
from torch import nn

import patrickstar as ps
from patrickstar._hardware.accelerator import TorchDevice
from patrickstar._schedule.eviction_prefetch import AggressivePrefetch, DemandFetch
from patrickstar._tiers import page_codec

WIDTH, LAYERS, STEPS = 48, 6, 4
MODELS = "layers", "uneven layers", "words"
_EXPECTED: dict[Any, Any] = {}
PARAM16_BYTES = LAYERS * 2 * (WIDTH * WIDTH + WIDTH)


def _build(model: str) -> Any:
    """Build a model: equal layers, layers whose chunks leave gaps of different sizes on the host, or an embedding."""
    if model == "layers":
        return toys.layers(WIDTH, LAYERS, nn.GELU)
    if model == "uneven layers":
        widths = [48, 20, 72, 33, 64, 12, 80, 48]
        return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))
    return nn.Sequential(nn.Embedding(500, WIDTH), toys.layers(WIDTH, 4, nn.GELU))


def _data(model: str, count: int) -> list[Any]:
    """Return batches on the device."""
    if model == "words":
        generator = torch.Generator().manual_seed(2)
        return [torch.randint(0, 40, (3, 8), generator=generator).to("strict") for _ in range(count)]
    return [batch.to("strict") for (batch,) in toys.inputs(count, width=WIDTH, rows=24)]


def _loop(trainer: Any, model: str, accumulation: int, clip: bool, options: tuple[str, ...], update: bool) -> list[Any]:
    """Train some steps without a wait between them."""
    results: list[Any] = []
    for number, batch in enumerate(_data(model, accumulation * STEPS)):
        last, step = number % accumulation == accumulation - 1, number // accumulation
        if "freeze" in options and number == 2 * accumulation:
            for param in list(trainer.module.parameters())[1::3]:
                param.requires_grad_(False)
        loss = trainer(batch).float().square().mean()
        trainer.backward(loss / accumulation, **({"update": True} if update and last else {}))
        results.append(loss.detach().clone())
        if not last:
            continue
        if "discard" in options and step == 2:
            trainer.optimizer.zero_grad()
            continue
        if clip:
            results.append(trainer.clip_grad_norm_(0.5).clone())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        if "read" in options and step in (1, 2):
            results += [value.clone() for value in trainer.state_dict().values()]
        if "evaluate" in options and step in (0, 2):
            with torch.no_grad():
                results.append(trainer.eval()(batch).clone())
            trainer.train()
        if "load" in options and step in (0, 2):
            state = {name: value.clone() for name, value in trainer.state_dict().items()}
            trainer.load_state_dict({name: value.mul_(0.5) for name, value in state.items()})
        if "optimizer states" in options and step in (0, 2):
            trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    return results


def _expected(precision: str, *options: Any) -> Any:
    """Return the results and parameters of plain PyTorch, which are the same in all scenarios of these options."""
    if (precision, *options) not in _EXPECTED:
        strict_device.configure()
        reference = reference_of(lambda: _build(options[0]), ps.Config(device="strict", precision=precision))
        _EXPECTED[precision, *options] = _loop(reference, *options, False), reference.state_dict()
    return _EXPECTED[precision, *options]


def run(seed: int) -> bool:
    """Compare a random loop with plain PyTorch; return False if its random budgets are too small."""
    choice = random.Random(seed)
    model, accumulation, clip = choice.choice(MODELS), choice.choice([1, 1, 2]), choice.random() < 0.3
    kinds = ("discard", "freeze", "read", "evaluate", "load", "optimizer states")
    options = tuple(name for name in kinds if choice.random() < 0.2)
    precision = choice.choice(["bf16", "bf16", "fp32"])
    results, parameters = _expected(precision, model, accumulation, clip, options)
    # Pages of a block gain something if they are not rounded to whole blocks.
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(page_codec, "BLOCK_BYTES", 64):
        disk = ps.Disk(directory, packed=seed % 2 == 0) if choice.random() < 0.35 else None
        itemsize = 2 if precision == "bf16" else 4
        device = choice.choice([0.45, 0.7, 1.6, 20] if model != "words" else [1.5, 2, 3, 20])
        numel = sum(values.numel() for values in parameters.values())
        needed = numel * (12 + itemsize) // 1024  # masters, two states and evicted parameters, in KiB
        tight = choice.random() < 0.5
        config = ps.Config(
            device="strict",
            precision=precision,
            chunk_size=choice.choice(["5KiB", "10KiB", "16KiB"]),
            device_memory=int(device * PARAM16_BYTES * itemsize / 2) + 16384,
            host_memory=1024
            * (choice.randint(90, 300) if disk is not None else needed + choice.randint(24, 90) if tight else 4096),
            disk=disk,
            activation_offload=choice.choice([0.4, 1.0]) if choice.random() < 0.4 else 0.0,
        )
        room = choice.choice([0, 0, 100, 200, 400]) * 1024
        policy = choice.choice([None, AggressivePrefetch, DemandFetch])
        evict_everything = choice.random() < 0.2
        update = accumulation == 1 and not clip and "discard" not in options and choice.random() < 0.4
        close = choice.random() < 0.5
        if update and choice.random() < 0.6:
            config = config.model_copy(update={"update": ps.InBackward()})
        strict_device.configure(seed=seed)
        if room:
            gc.collect()
            allocated = TorchDevice(torch.device("strict")).allocated_bytes
            strict_device.configure(seed=seed, capacity=allocated + int(config.device_memory) + room)
        hooks = dict(page_bytes=4096, prefetch_policy=policy, evict_everything=evict_everything)
        try:
            engine = engine_of(lambda: _build(model), config, **hooks)
        except ps.errors.BudgetError:
            return False
        try:
            found = _loop(engine, model, accumulation, clip, options, update)
            if close:  # with copies in flight
                module = engine.module
                engine(_data(model, 1)[0])
                engine.close()
                values = {name: value.detach() for name, value in module.state_dict().items()}
            else:
                values = engine.state_dict()
            ps.testing.assert_same_bits(results, found, f"scenario {seed}: results")
            ps.testing.assert_same_bits(parameters, dict(values), f"scenario {seed}: parameters")
        except (ps.errors.BudgetError, torch.OutOfMemoryError):
            return False
        finally:
            engine.close()
    return True


def main(count: int, limit_s: float = 600.0) -> None:
    """Run scenarios and print the seeds of those that were refused; return if none fails or runs into the limit."""
    faulthandler.enable()
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(count):
            faulthandler.dump_traceback_later(limit_s, exit=True)
            if not run(seed):
                print(seed)
            if seed % 4 == 3:
                run_schedule(seed, directory)


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(float, sys.argv[2:]))
