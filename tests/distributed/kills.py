"""Kills training, or saving, at random instants, and goes on from the newest checkpoint, again and again.

    PYTHONPATH=tests python -m distributed.kills 200 --processes 1 2 --seed 0

Every step of every life has to have the bits that it has in a run that nobody disturbs, and so has the end. Half of
the kills strike all processes at once, as when the power fails; the others one of them, and the rest has to end by
itself. Checkpoints are written after every step, by turns beside training and before it goes on.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from toys import layers, mean_square
from xxhash import xxh3_64_hexdigest

import patrickstar as ps
from distributed.ranks import free_port
from patrickstar import testing
from patrickstar.errors import PeerError

STEPS = 24
ENDED_BY_PEER = 3
"""The exit code of a process that ends since another one did."""
PATIENCE_S = 60.0


class Model(nn.Module):
    """Large enough that writing it takes a while; each process has a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(256, 12)
        self.norm = nn.BatchNorm1d(256)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mean_square(self.dropout(self.norm(self.layers(x))))


def live(folder: Path, rank: int, size: int) -> None:
    """One life of one process: go on from the newest checkpoint to the end."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = ps.Config(device="cpu", precision="bf16", chunk_size="256KiB", optimizer=ps.AdamW(lr=1e-3))
    engine, optimizer = ps.initialize(Model, config)
    checkpoints = ps.Checkpoints(folder / "run", keep=2)
    torch.manual_seed(100 + rank)
    place = checkpoints.load(engine) or {"step": 0}
    with (folder / f"losses-{rank}").open("a") as log:
        for step in range(place["step"] + 1, STEPS + 1):
            loss = engine(torch.randn(4, 256))
            engine.backward(loss)
            optimizer.step()
            log.write(f"{step} {loss.item().hex()}\n")
            log.flush()
            assert checkpoints.save(engine, step, {"step": step}, wait=step % 2 == 0)
    states = optimizer.state_dict()["state"]
    values = [*engine.state_dict().values(), *(one[key] for one in states.values() for key in sorted(one))]
    engine.close()
    digest = xxh3_64_hexdigest(b"".join(value.reshape(-1).view(torch.uint8).numpy().tobytes() for value in values))
    (folder / f"end-{rank}").write_text(digest)
    if size > 1:
        dist.destroy_process_group()


def begin(folder: Path, size: int) -> list[int]:
    """Processes, forked from this one, which has imported all they need and computed nothing."""
    port, children = free_port(), []
    for rank in range(size):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            log = os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)} if size > 1 else {}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "ERROR"}
            live(folder, rank, size)
            code = 0
        except BaseException as error:
            traceback.print_exc()
            code = ENDED_BY_PEER if "PeerError" in traceback.format_exc() or _lost_peer(error) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return children


def _lost_peer(error: BaseException) -> bool:
    """Whether the others had gone before they were known: when the processes joined, or left."""
    return isinstance(error, PeerError | dist.DistError) or "onnection" in str(error)


def end(children: list[int], seconds: float) -> list[int]:
    """How each has ended: its exit code, or minus the signal."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for child in set(children) - codes.keys():
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise AssertionError(
                f"{len(children) - len(codes)} of {len(children)} processes did not end in {seconds} s"
            )
        time.sleep(0.002)
    return [codes[child] for child in children]


@dataclass
class Expected:
    """What a run comes to that nobody disturbs, and how long it takes."""

    losses: list[dict[int, str]]
    ends: list[str]
    seconds: float


def losses(folder: Path, size: int) -> list[list[tuple[int, str]]]:
    """What each process has logged; a last line that was cut is left out."""
    found = []
    for rank in range(size):
        path = folder / f"losses-{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found.append([(int(line.split()[0]), line.split()[1]) for line in lines if line.endswith("\n")])
    return found


def undisturbed(folder: Path, size: int) -> Expected:
    """The run that all others are compared with."""
    started = time.monotonic()
    codes = end(begin(folder, size), PATIENCE_S)
    seconds = time.monotonic() - started
    assert codes == [0] * size, f"{codes}: {(folder / 'said-0').read_text()}"
    seen = losses(folder, size)
    assert all([step for step, _ in one] == list(range(1, STEPS + 1)) for one in seen)
    return Expected([dict(one) for one in seen], ends(folder, size), seconds)


def ends(folder: Path, size: int) -> list[str]:
    """What each process has come to."""
    return [(folder / f"end-{rank}").read_text() for rank in range(size)]


def strike(count: int, size: int, seed: int, say: Callable[[str], None]) -> None:
    """Kill so many times."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as made:
        expected = undisturbed(_fresh(Path(made) / "undisturbed"), size)
        say(f"{size} processes, seed {seed}: {STEPS} steps in {expected.seconds:.1f} s where nobody disturbs them")
        folder, kills, lives, resumed = _fresh(Path(made) / "killed"), 0, 0, 0
        while kills < count:
            newest = ps.Checkpoints(folder / "run").newest()
            resumed += newest is not None
            children = begin(folder, size)
            lives += 1
            time.sleep(draw.uniform(0, expected.seconds * 0.6))
            victims = children if draw.random() < 0.5 else [draw.choice(children)]
            for child in victims:
                os.kill(child, signal.SIGKILL)
            codes = end(children, PATIENCE_S)
            told = "\n".join((folder / f"said-{rank}").read_text() for rank in range(size))
            assert set(codes) <= {0, -signal.SIGKILL, ENDED_BY_PEER}, f"kill {kills}: {codes}\n{told}"
            kills += -signal.SIGKILL in codes
            for rank, one in enumerate(losses(folder, size)):
                for step, bits in one:
                    assert bits == expected.losses[rank][step], f"kill {kills}, rank {rank}, step {step}: {bits}"
            if codes == [0] * size:
                assert ends(folder, size) == expected.ends, f"after {kills} kills the end is another"
                folder = _fresh(folder)
        while end(begin(folder, size), PATIENCE_S) != [0] * size:
            raise AssertionError((folder / "said-0").read_text())
        assert ends(folder, size) == expected.ends, f"after {kills} kills the end is another"
        say(f"{kills} kills in {lives} lives, {resumed} of them resumed: every step and every end had its bits")


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="how many kills for each number of processes")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for size in options.processes:
        strike(options.count, size, options.seed, lambda text: print(text, flush=True))


if __name__ == "__main__":
    assert testing  # it is imported before the fork, with all that it needs
    main()
