"""Kill training or saving at random moments, and resume from the newest checkpoint, repeatedly.

All losses and the final state must have the bits of a run without kills. Half of the kills end all processes at once,
like a power failure. The others end one process, and the rest must end by themselves. A checkpoint is saved after every
step, in turns in the background and blocking.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sampling import draws

import patrickstar as ps

from . import ranks
from .restarts import Model, digest

LOST_PEER = re.compile(r"PeerError|Dist\w*Error|[Cc]onnection")
"""What a process says whose peers ended, also while it joined or left the process group."""
END_TIMEOUT_S = 300.0


def run_process(folder: str, steps: int) -> None:
    """Train from the newest checkpoint to the end; runs in each process."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        # A process whose peer was killed before it listened would wait for it for half an hour.
        dist.init_process_group("gloo", timeout=timedelta(seconds=END_TIMEOUT_S / 10))
    torch.manual_seed(0)
    name = Path(folder).name
    more: dict[str, Any] = {"update": ps.Delayed(after=2) if "delayed" in name else None}
    if "durable" in name:
        host = f"{(9 if more['update'] is None else 20) * -(-size // 2)}MiB"  # of all processes together
        more |= {"device_memory": "2MiB", "host_memory": host, "disk": ps.Disk(folder, durable=True)}
    config = ps.Config(device="cpu", precision="bf16", chunk_size="256KiB", optimizer=ps.AdamW(lr=1e-3), **more)
    engine, optimizer = ps.initialize(lambda: Model(256, 12), config)  # takes a while to save
    assert (engine.inspect().disk is not None) == ("durable" in name)
    checkpoints = ps.Checkpoints(Path(folder, "run"), keep=2)
    torch.manual_seed(100 + rank)
    progress = checkpoints.load(engine) or {"step": 0}
    with Path(folder, f"losses-{rank}").open("a") as log:
        for step in range(progress["step"] + 1, steps + 1):
            loss = engine(torch.randn(4, 256))
            engine.backward(loss)
            optimizer.step()
            log.write(f"{step} {loss.item().hex()}\n")
            log.flush()
            assert checkpoints.save(engine, step, {"step": step}, wait=step % 2 == 0)
    Path(folder, f"end-{rank}").write_text(digest(engine))
    engine.close()
    if size > 1:
        dist.destroy_process_group()


def start(folder: Path, size: int, steps: int) -> list[Any]:
    """Start the processes."""
    options = {"folder": str(folder), "steps": steps}
    return ranks.start(size, run_process, options)


def losses(folder: Path, size: int) -> list[list[tuple[int, str]]]:
    """Return the losses that each process logged, without an incomplete last line."""
    found = []
    for rank in range(size):
        path = folder / f"losses-{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found.append([(int(line.split()[0]), line.split()[1]) for line in lines if line.endswith("\n")])
    return found


def run_to_the_end(folder: Path, size: int, steps: int, within_s: float) -> None:
    """Run without kills, and assert that all processes succeed."""
    ranks.check_ended(ranks.wait(start(folder, size, steps), within_s), [0] * size)


def ends(folder: Path, size: int) -> list[str]:
    """Return a digest of the final state of each process."""
    return [(folder / f"end-{rank}").read_text() for rank in range(size)]


def check_kills(count: int, processes: int, seed: int, steps: int, kind: str = "") -> None:
    """Kill `count` times, and compare all losses and final states."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as root:
        whole, started = _fresh(Path(root) / f"expected{kind}"), time.monotonic()
        run_to_the_end(whole, processes, steps, END_TIMEOUT_S)
        whole_s, expected = time.monotonic() - started, [dict(log) for log in losses(whole, processes)]
        assert all(list(log) == list(range(1, steps + 1)) for log in expected)
        print(f"{processes} processes, seed {seed}: {steps} steps in {whole_s:.1f} s without kills", flush=True)
        folder, kills, starts, resumed = _fresh(Path(root) / f"killed{kind}"), 0, 0, 0
        while kills < count:
            newest = ps.Checkpoints(folder / "run").newest()
            resumed += newest is not None
            children = start(folder, processes, steps)
            starts += 1
            time.sleep(draw.uniform(0, whole_s * 0.6))
            victims = children if draw.random() < 0.5 else [draw.choice(children)]
            for child in victims:
                child.kill()
            ended = ranks.wait(children, END_TIMEOUT_S + 2 * whole_s)  # the machine may be busy
            codes = [each.code for each in ended]
            for each in ended:
                assert each.code in (0, -signal.SIGKILL) or (each.code == 1 and LOST_PEER.search(each.text)), (
                    f"kill {kills}: {codes}\n{each.text}"
                )
            kills += -signal.SIGKILL in codes
            for rank, log in enumerate(losses(folder, processes)):
                for step, bits in log:
                    assert bits == expected[rank][step], f"kill {kills}, rank {rank}, step {step}: {bits}"
            if codes == [0] * processes:
                assert ends(folder, processes) == ends(whole, processes), f"after {kills} kills the final state differs"
                folder = _fresh(folder)
        run_to_the_end(folder, processes, steps, END_TIMEOUT_S + 2 * whole_s)
        assert ends(folder, processes) == ends(whole, processes), f"after {kills} kills the final state differs"
        runs = f"{kills} kills in {starts} runs, {resumed} of them resumed"
        print(f"{runs}: all losses and final states were bit-identical", flush=True)


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_few_kills(size):
    check_kills(count=draws(4), processes=size, seed=1, steps=draws(24))


def test_kills_while_updates_are_delayed():
    check_kills(count=draws(3), processes=2, seed=3, steps=draws(24), kind=" delayed")


def test_kills_while_checkpoints_refer_to_pages_on_disk():
    check_kills(count=draws(18), processes=1, seed=4, steps=24, kind=" durable")


@pytest.mark.slow
def test_the_example_that_kills_itself_ends_with_the_same_bits(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "kill_me.py"
    done = subprocess.run([sys.executable, script, "--seed", "3"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "all losses and parameters have the same bits" in done.stdout, done


@pytest.mark.slow
@pytest.mark.parametrize("size, kind", [(1, ""), (2, ""), (2, " delayed")])
def test_a_hundred_kills(size, kind):
    check_kills(count=50, processes=size, seed=2, steps=24, kind=kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, kind, count",
    [
        (1, " durable", 450),
        (2, " durable", 200),
        (4, " durable", 50),
        (1, " durable delayed", 200),
        (2, " durable delayed", 100),
    ],
)
def test_a_thousand_kills_of_durable_runs(size, kind, count):
    check_kills(count=count, processes=size, seed=5, steps=24, kind=kind)
