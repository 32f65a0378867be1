"""Lock-free updates of several processes: run, replay and plain PyTorch in the order of the logs give the same bits."""

import random
import re
import signal
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
        ps.Engine(build, config, world=World(CPU), mesh=mesh_of(replicas), page_bytes=4096)
    least = int(re.search(r"host_memory=(\d+)", str(refused.value)).group(1))
    return config.model_copy(update={"host_memory": (least + more_bytes) * dist.get_world_size()})


def own_batches(patch: pytest.MonkeyPatch) -> None:
    """Let each process have batches of its own."""
    batch, rank = cases.batch, dist.get_rank()
    patch.setattr(cases, "batch", lambda seed: batch(1000 * rank + seed))


def run_three(config: ps.Config, script: Any, seed: int, replicas: int, **hooks: Any) -> ps.StepStats:
    """Run with logs, follow them in plain PyTorch, replay them; compare all bits, and return statistics."""
    log, hooks = Path(config.update.log), hooks | {"poison": True, "meter": ps.testing.NoMeter(), "page_bytes": 4096}

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
        precision = choice.choice(["bf16", "bf16", "fp16", "fp32"])
        sums = choice.choice([0, 0, 8 * 16384]) if precision != "fp32" else 0  # which pages in flight may take
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


def killed_config(folder: Path) -> ps.Config:
    """Return a configuration with too little host memory."""
    late = ps.LockFree(after=1, max_staleness=3, log=folder / "run.jsonl")
    budgets = dict(device_memory="60KiB", host_memory="2KiB", disk=ps.Disk(folder))
    return ps.Config(device="cpu", precision="bf16", chunk_size="10KiB", update=late, **budgets)


@ranks.joined
def train(folder: str, steps: int, die_at: int) -> None:
    """Train from the newest checkpoint; unless the run was resumed, the last rank dies; runs in each process."""
    rank, checkpoints = dist.get_rank(), ps.Checkpoints(Path(folder, "saved"))
    with pytest.MonkeyPatch.context() as patch:
        own_batches(patch)
        let_chances_pass(patch, 0.6, rank + 10 * die_at)
        config = with_least_host_memory(killed_config(Path(folder)), 1, 0)
        torch.manual_seed(0)
        engine = ps.Engine(build, config, world=World(CPU), page_bytes=4096, meter=ps.testing.NoMeter())
        saved = checkpoints.load(engine)
        for step in range(saved["step"] + 1 if saved else 1, steps + 1):
            cases.backward(engine, step)
            if step == die_at and rank == dist.get_world_size() - 1:
                ranks.die()
            engine.optimizer.step()
            if step % 3 == 0:
                checkpoints.save(engine, step, {"step": step})
        assert engine.stats.total.staleness > 0
        torch.save(engine.state_dict(), Path(folder, f"end-{rank}"))
        engine.close(keep=False)


@ranks.joined
def follow(folder: str, steps: int) -> None:
    """Compare the end with plain PyTorch in the order of the logs; runs in each process."""
    rank, log = dist.get_rank(), Path(folder, "run.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        own_batches(patch)
        torch.manual_seed(0)
        config = killed_config(Path(folder)).model_copy(update=dict.fromkeys(["disk", "host_memory", "device_memory"]))
        reference = AveragingTrainer(build, replaying(config, log.with_name(f"run-{rank}.jsonl")))
        reference.optimizer = LockFreeAveraging(reference, log)
        for step in range(1, steps + 1):
            cases.backward(reference, step)
            reference.optimizer.step()
            if step % 3 == 0:
                reference.optimizer.flush()
        ps.testing.assert_same_bits(reference.state_dict(), torch.load(Path(folder, f"end-{rank}")), "end")


@pytest.mark.parametrize("die_at", [5, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 4, 6, 7))])
def test_a_killed_run_goes_on_and_its_logs_with_it(die_at, tmp_path):
    options = {"folder": str(tmp_path), "steps": 8}
    ended = ranks.wait(ranks.start(2, train, options | {"die_at": die_at}))
    assert ended[1].code == -signal.SIGKILL and ended[0].code == 1, ended[0].text
    ranks.run(2, train, **options, die_at=0)
    ranks.run(2, follow, **options)


@pytest.mark.slow
@pytest.mark.parametrize("size, replicas", [(2, 1), (4, 1), (4, 2)])
def test_many_more_loops(size, replicas, tmp_path):
    ranks.run(size, loops, folder=str(tmp_path), seeds=list(range(1000 * size, 1000 * size + 100)), replicas=replicas)
