"""Train from disk with a checkpoint of every step, kill the training at random, go on, and compare with a run in peace.

    python examples/kill_me.py

A second process trains, and is killed (SIGKILL) after a random time, again and again, until it has come to the end. Its
losses and its last parameters must have the bits of a run that nobody killed. With --seed 3 it printed:

    in peace: 40 steps, parameters 8a3f27b6f4d0527b
    kill 1 at once
    kill 2 after step 8, resumed from step 0
    kill 3 after step 13, resumed from step 7
    kill 4 after step 31, resumed from step 13
    finished: parameters 8a3f27b6f4d0527b
    4 kills: all losses and parameters have the same bits

A checkpoint refers to the pages that the step has written to the swap file, so it takes no further bytes of the disk.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import patrickstar as ps

LOSSES = "losses.jsonl"


def build() -> nn.Module:
    """Return a perceptron of 3 million parameters with dropout."""
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1)) for _ in range(12)]
    return nn.Sequential(*layers)


def train(folder: Path, steps: int) -> None:
    """Train from the newest checkpoint, if there is one, to the last step."""
    torch.manual_seed(0)
    disk = ps.Disk(folder, durable=True)
    config = ps.Config(
        device="cpu",
        device_memory="8MiB",
        host_memory="24MiB",
        chunk_size="1MiB",
        disk=disk,
        precision="fp32",
        optimizer=ps.AdamW(lr=1e-3),
    )
    engine, optimizer = ps.initialize(build, config)
    checkpoints = ps.Checkpoints(folder / "steps", keep=1)
    saved = checkpoints.load(engine) or {"step": 0}
    with (folder / LOSSES).open("a") as log:
        for step in range(saved["step"] + 1, steps + 1):
            batch = torch.randn(8, 512)
            loss = (engine(batch) - batch).square().mean()
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(engine, step, {"step": step}, wait=False)
            log.write(json.dumps({"step": step, "loss": loss.item().hex(), "from": saved["step"]}) + "\n")
            log.flush()
    state = engine.state_dict()
    digest = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
    (folder / "end").write_text(digest.hexdigest()[:16])
    engine.close(keep=False)


def logged(folder: Path) -> list[dict[str, object]]:
    """Return the steps that a run has logged, without a line that a kill has cut."""
    path = folder / LOSSES
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def start(folder: Path, steps: int) -> "subprocess.Popen[bytes]":
    """Start the training in another process."""
    return subprocess.Popen([sys.executable, __file__, "--steps", str(steps), "--in", str(folder)])


def main(options: Sequence[str] | None = None) -> None:
    """Run in peace, then with kills, and compare. Raises SystemExit with a message if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None, help="of the moments of the kills")
    parser.add_argument("--in", dest="folder", type=Path, help="train in this folder, and kill nothing")
    args = parser.parse_args(options)
    if args.folder is not None:
        train(args.folder, args.steps)
        return
    seed = random.randrange(2**32) if args.seed is None else args.seed
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=".") as root:
        peaceful, killed = Path(root, "peaceful"), Path(root, "killed")
        peaceful.mkdir()
        killed.mkdir()
        began = time.monotonic()
        if start(peaceful, args.steps).wait():
            sys.exit("the run in peace failed")
        seconds, expected = time.monotonic() - began, {each["step"]: each["loss"] for each in logged(peaceful)}
        print(f"in peace: {args.steps} steps, parameters {(peaceful / 'end').read_text()}", flush=True)
        kills = 0
        while not (killed / "end").exists():
            child = start(killed, args.steps)
            try:
                code = child.wait(draw.uniform(0, seconds))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                kills, code = kills + 1, 0
                steps = logged(killed)
                last = f"after step {steps[-1]['step']}, resumed from step {steps[-1]['from']}" if steps else "at once"
                print(f"kill {kills} {last}", flush=True)
            if code:
                sys.exit(f"the training failed after {kills} kills (seed {seed})")
        for each in logged(killed):
            step, loss = each["step"], each["loss"]
            if loss != expected[step]:
                sys.exit(f"step {step} has the loss {loss}, in peace {expected[step]} (seed {seed})")
        end = (killed / "end").read_text()
        print(f"finished: parameters {end}", flush=True)
        if end != (peaceful / "end").read_text():
            sys.exit(f"the parameters differ (seed {seed})")
        print(f"{kills} kills: all losses and parameters have the same bits")


if __name__ == "__main__":
    main()
