"""Lock-free updates of several processes: run, replay and plain PyTorch in the order of the logs give the same bits."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import speculation_cases as cases
import torch
import torch.distributed as dist
from lock_free_cases import let_chances_pass, replaying
from speculation_cases import DELAYED_EVENTS, PARAM16_BYTES, build, loop

import patrickstar as ps
from patrickstar._distributed.process_group import World

from . import ranks
from .reference import AveragingTrainer, LockFreeAveraging
from .test_exactness import CPU, mesh_of

EVENTS = tuple(event for event in DELAYED_EVENTS if event not in (cases.read_gradients, cases.change_gradient))
"""Events that the reference of several processes has: it adds gradients in the step."""


def with_least_host_memory(config: ps.Config, replicas: int, more_bytes: int) -> ps.Config:
    """Return the configuration with as much host memory as a refusal asks for, and `more_bytes` for each process."""
    with pytest.raises(ps.errors.BudgetError, match=r"host_memory=\d+") as refused:
        ps.Engine(build, config, world=World(CPU), mesh=mesh_of(replicas), page_bytes=8192)
    least = int(re.search(r"host_memory=(\d+)", str(refused.value)).group(1))
    return config.model_copy(update={"host_memory": (least + more_bytes) * dist.get_world_size()})


def own_batches(patch: pytest.MonkeyPatch) -> None:
    """Let each process have batches of its own."""
    batch, rank = cases.batch, dist.get_rank()
    patch.setattr(cases, "batch", lambda seed: batch(1000 * rank + seed))


def run_three(config: ps.Config, script: Any, seed: int, replicas: int, **hooks: Any) -> ps.StepStats:
    """Run with logs, follow them in plain PyTorch, replay them; compare all bits, and return statistics."""
    log, hooks = Path(config.update.log), hooks | {"poison": True, "meter": ps.testing.NoMeter(), "page_bytes": 8192}

    def trained(config: ps.Config) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        engine = ps.Engine(build, config, world=World(CPU), mesh=mesh_of(replicas), **hooks)
        found = script(engine), engine.state_dict(), engine.optimizer.state_dict(), engine.stats.total
        engine.close(keep=False)
        return found

    results, state, optimizer, stats = trained(config)
    dist.barrier()
    torch.manual_seed(seed)
    own = log.with_name(f"{log.stem}-{dist.get_rank()}{log.suffix}")
    plain = replaying(config, own, device_memory=None, host_memory=None, disk=None)
    reference = AveragingTrainer(build, plain, replicas=replicas)
    reference.optimizer = LockFreeAveraging(reference, log)
    ps.testing.assert_same_bits(script(reference), results, "results of the reference")
    ps.testing.assert_same_bits(reference.state_dict(), state, "parameters of the reference")
    ps.testing._assert_same_states(reference.optimizer.state_dict(), optimizer)
    again, others, states, _ = trained(replaying(config, log))
    ps.testing.assert_same_bits(results, again, "results of the replay")
    ps.testing.assert_same_bits(state, others, "parameters of the replay")
    ps.testing._assert_same_states(optimizer, states)
    return stats


@ranks.joined
def loops(folder: str, seeds: list[int], replicas: int = 1) -> None:
    """Train random loops while the disks of the processes have other speeds; runs in each process."""
    late = 0.0
    for seed in seeds:
        choice, rank, size = random.Random(seed), dist.get_rank(), dist.get_world_size()
        precision, sums = choice.choice(["bf16", "bf16", "fp16", "fp32"]), choice.choice([0, 0, 8 * 16384])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                cases, "loop", lambda events, counts, most=sums: loop(events, [min(c, most or 1) for c in counts])
            )
            script = cases.random_loop(choice, EVENTS)
        update = ps.LockFree(
            after=choice.choice([0, 1, 4]),
            max_staleness=choice.choice([1, 2, 4, 7]),
            gradient_dtype=choice.choice(["fp32", "fp32", "16-bit" if precision != "fp16" else "fp32"]),
            log=Path(folder, f"{seed}.jsonl"),
        )
        config = ps.Config(
            device="cpu",
            precision=precision,
            chunk_size=choice.choice(["6KiB", "10KiB", "18KiB"]),
            optimizer=ps.EMA(ps.AdamW(lr=1e-2), decay=0.9),
            device_memory=int(choice.choice([1.6, 2.5]) * PARAM16_BYTES * (2 if precision == "fp32" else 1)) + 32768,
            host_memory=1024 * size,
            disk=ps.Disk(folder),
            reduce_dtype=choice.choice(["16-bit", "fp32"]),
            update=update,
        )
        config = with_least_host_memory(config, replicas, sums + choice.choice([0, 20, 50]) * 1024)
        evict = choice.random() < 0.5
        print(f"seed {seed}: {config!r}, evict {evict}", flush=True)
        with pytest.MonkeyPatch.context() as patch:
            own_batches(patch)
            let_chances_pass(patch, choice.choice([0.0, 0.5, 0.9, 1.0]) if rank else 0.3, 10 * seed + rank)
            stats = run_three(config, script, seed, replicas, evict_everything=evict)
        print(f"disk {stats.disk_write_bytes}, staleness {stats.staleness}, {stats.peak_staleness}", flush=True)
        late += stats.staleness
    assert late, "no update was late"


@pytest.mark.parametrize("size, replicas", [(2, 1), (4, 2)])
def test_run_replay_and_reference_agree(size, replicas, tmp_path):
    ranks.run(size, loops, folder=str(tmp_path), seeds=ranks.seeds(32 // size), replicas=replicas)


@pytest.mark.slow
@pytest.mark.parametrize("size, replicas", [(2, 1), (4, 1), (4, 2)])
def test_many_more_loops(size, replicas, tmp_path):
    ranks.run(size, loops, folder=str(tmp_path), seeds=list(range(1000 * size, 1000 * size + 100)), replicas=replicas)
