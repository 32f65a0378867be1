"""Processes that join through one store, which outlives them as that of torchrun's agent does."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from toys import layers, mean_square, outcome

import patrickstar as ps

from . import ranks


@contextmanager
def agent_store() -> Iterator[int]:
    """Host a store in this process; return its port."""
    timeout = timedelta(seconds=ranks.WITHIN_S)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    yield store.port


def environment(rank: int, size: int) -> dict[str, str]:
    """Return what torchrun's agent sets for a process, beside the address."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def start(port: int, size: int, function: Any, options: dict[str, Any], chosen: Sequence[int] | None = None) -> list:
    """Start processes as torchrun's agent does: all `size` of them, or the `chosen` ranks."""
    chosen = range(size) if chosen is None else chosen
    env = [environment(rank, size) for rank in chosen]
    return ranks.start(len(env), function, options, env=env, port=port)


def run(port: int, size: int, function: Any, options: dict[str, Any]) -> list[ranks.Ended]:
    """Run processes to a successful end."""
    ended = ranks.wait(start(port, size, function, options))
    ranks.check_ended(ended, [0] * size)
    return ended


class Model(nn.Module):
    """Model with dropout, and a buffer that differs between processes."""

    def __init__(self, width: int = 16, count: int = 3) -> None:
        super().__init__()
        self.layers = layers(width, count, lambda: nn.Dropout(0.2))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mean_square(self.norm(self.layers(x)))


def train(folder: str, steps: int, die_at: int = 0) -> None:
    """Train from the newest checkpoint.

    Unless the run was resumed, the last rank dies in step `die_at`, which is even, once the checkpoint before it is
    complete. Rank 0 appends the number of each step and its loss to a file, and writes a digest of the end.

    Runs in each process.
    """
    ps.join()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    config = ps.Config(device="cpu", precision="fp32", chunk_size=512, optimizer=ps.AdamW(lr=0.01))
    engine, optimizer = ps.initialize(Model, config)
    torch.manual_seed(10 + rank)
    checkpoints = ps.Checkpoints(Path(folder, "run"), keep=2)
    saved = checkpoints.load(engine)
    first = saved["step"] + 1 if saved else 1
    for step in range(first, steps + 1):
        loss = engine(torch.randn(4, 16))
        engine.backward(loss)
        if step == die_at and rank == size - 1 and not saved:
            while not Path(folder, "run", f"step-{step // 2 * 2 - 2}").exists():
                time.sleep(0.01)
            ranks.die()
        optimizer.step()
        optimizer.zero_grad()
        mean = engine.average(loss.item())
        if rank == 0:
            with Path(folder, "losses").open("a") as log:
                log.write(f"{step} {mean.hex()}\n")
        if step % 2 == 0:
            checkpoints.save(engine, step, {"step": step}, wait=False)
    end = digest(engine)
    engine.close()
    if rank == 0:
        Path(folder, "end").write_text(end)


def digest(engine: ps.Engine) -> str:
    """Return a digest of the parameters, buffers and optimizer states, the same in each process."""
    return sha256(b"".join(value.contiguous().view(-1).numpy().tobytes() for value in outcome(engine))).hexdigest()


def losses(folder: Path) -> dict[int, set[str]]:
    """Return the losses that were logged for each step."""
    found: dict[int, set[str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found
