"""Late updates of several processes have the bits of their recurrence in plain PyTorch, averaged in rank order."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laws.models import Waves, smallest_device_bytes
from probes import reduce_early

import patrickstar as ps

from . import ranks
from .test_exactness import Branches, compare, random_config, random_script, random_shape


def delayed(draw: random.Random) -> ps.Delayed:
    return ps.Delayed(after=draw.choice([0, 1, 2, 3]))


@ranks.joined
def everything_evicted(seeds: list[int], replicas: int = 1) -> None:
    """Train random models, several epochs with the same loop; runs in each process."""
    for seed in seeds:
        draw = random.Random(seed)
        shape, config = random_shape(draw), random_config(draw, update=delayed(draw))
        own = random.Random(100 * seed + dist.get_rank())
        options: dict[str, Any] = dict(evict_everything=True)
        if draw.random() < 0.4:  # budgets that differ between processes
            size, wave_bytes = dist.get_world_size(), own.randint(0, 12000)
            group = config.chunk_size if config.chunk_size == "auto" else config.chunk_size * size
            # The lists of a shard whose update is late are two more than the check before training counts.
            least = smallest_device_bytes(shape, group, config.precision) + 6144 * size
            config = config.model_copy(update={"device_memory": 2 * least + own.randint(0, 16000) + wave_bytes})
            options = dict(meter=Waves(wave_bytes))
        print(f"seed {seed}: {shape}, {config!r}", flush=True)
        once, incomplete = random_script(draw, seed), own.random() < 0.3

        def script(trainer: Any, once: Callable = once, incomplete: bool = incomplete) -> list[torch.Tensor]:
            if isinstance(trainer, ps.Engine) and incomplete:
                reduce_early(trainer)
            return once(trainer) + once(trainer)

        compare(shape.build, config, script, seed, replicas, **options)


def zero_grad(trainer: Any) -> None:
    trainer.optimizer.zero_grad()


def flush(trainer: Any) -> None:
    trainer.optimizer.flush()


def write(trainer: Any) -> None:
    trainer.optimizer.flush()
    with torch.no_grad():
        for param in trainer.module.parameters():
            param.mul_(0.5)


def reload(trainer: Any) -> None:
    trainer.optimizer.flush()
    trainer.load_state_dict({name: value * 0.75 for name, value in trainer.state_dict().items()})


def clip(trainer: Any) -> None:
    trainer.clip_grad_norm_(1e-3)


EVENTS = zero_grad, flush, write, reload


@ranks.joined
def branches(seeds: list[int], replicas: int = 1) -> None:
    """Train with other paths, numbers of batches and evaluations in each process, also after its backwards.

    All processes flush, write, load, drop gradients, clip and step, but at different points of their loops.
    """
    for seed in seeds:
        draw, number = random.Random(seed), 100 * seed + dist.get_rank()
        config = random_config(draw, update=delayed(draw))
        own = random.Random(number)
        evict, once = own.random() < 0.5, draw.random() < 0.5
        print(f"seed {seed}: {config!r}, evict {evict}, once {once}", flush=True)

        def script(trainer: Any, seed: int = seed, number: int = number, once: bool = once) -> list[torch.Tensor]:
            together, own, seen = random.Random(seed), random.Random(number), []

            def evaluate() -> None:
                for _ in range(own.choice([0, 0, 1])):
                    with torch.no_grad():
                        seen.append(trainer(torch.arange(6).view(2, 3), [own.randrange(5) for _ in range(3)]))

            for _ in range(7):
                evaluate()
                backwards = together.choice([1, 2, 3]) if once else own.choice([0, 1, 1, 2])
                for each in range(backwards):
                    path = [own.randrange(5) for _ in range(own.randint(0, 6))]
                    loss = trainer(torch.tensor([[own.randrange(11) for _ in range(3)]]), path)
                    trainer.backward(loss, accumulate=not once or each < backwards - 1)
                    seen.append(loss.detach().clone())
                if together.random() < 0.4:
                    together.choice(EVENTS[:2])(trainer)
                evaluate()
                if together.random() < 0.3:
                    clip(trainer)
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
                if together.random() < 0.4:
                    together.choice(EVENTS)(trainer)
            return seen

        compare(Branches, config, script, seed, replicas, evict_everything=evict)


@pytest.mark.parametrize("function, size, replicas", [(everything_evicted, 2, 1), (branches, 2, 1), (branches, 4, 2)])
def test_bits_of_the_recurrence(function, size, replicas):
    ranks.run(size, function, seeds=ranks.seeds(48 // size), replicas=replicas)


@pytest.mark.slow
@pytest.mark.parametrize("size, replicas", [(2, 1), (4, 1), (4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("function", [everything_evicted, branches])
def test_many_more_cases(function, size, replicas):
    ranks.run(size, function, seeds=list(range(1000 * size, 1000 * size + 50)), replicas=replicas)
