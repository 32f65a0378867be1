"""Train on several processes, and continue after one of them was killed.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/restart.py

It prints the process IDs. Kill one of the processes in another terminal while it trains: kill -9 PID. torchrun then
restarts both, and they resume from the newest checkpoint. Here rank 1 was killed after step 13:

    rank 0 of 2 is process 30743
    rank 1 of 2 is process 30744
    ...
    step 11  loss 0.934024
    step 12  loss 0.878755
    step 13  loss 1.011272
    (torchrun reports the failure of process 30744)
    rank 0 of 2 is process 31617
    rank 1 of 2 is process 31618
    resumed from step 10
    step 11  loss 0.934024
    step 12  loss 0.878755
    step 13  loss 1.011272
    ...
    finished, parameters 855f4794d8cf28e0

The losses of steps 11 to 13 are the same before and after, and the last line, a digest of all parameters, is that of a
run without kills on the same machine. Another run begins at step 1 in another folder: --folder runs/another.
"""

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Sequence

import torch
from torch import nn

import patrickstar as ps


class Model(nn.Module):
    """Perceptron with dropout; returns the loss of reconstructing its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - x).square().mean()


def main(options: Sequence[str] | None = None) -> None:
    """Train from the newest checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/restart", help="folder of the checkpoints, which all processes share")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two steps, to have time for the kill")
    args = parser.parse_args(options)

    ps.join()
    torch.manual_seed(0)
    config = ps.Config(device="cpu", precision="fp32", optimizer=ps.AdamW(lr=1e-3))
    engine, optimizer = ps.initialize(Model, config)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sys.stdout.write(f"rank {rank} of {size} is process {os.getpid()}\n")  # at once, as the others write, too
    sys.stdout.flush()
    torch.manual_seed(1 + rank)  # each process draws its own data and dropout; checkpoints store the generators

    checkpoints = ps.Checkpoints(args.folder, keep=3)
    saved = checkpoints.load(engine)
    first = saved["step"] + 1 if saved else 1
    if saved and rank == 0:
        print(f"resumed from step {saved['step']}", flush=True)
    for step in range(first, args.steps + 1):
        loss = engine(torch.randn(8, 64))
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = engine.average(loss.item())
        if rank == 0:
            print(f"step {step}  loss {mean:.6f}", flush=True)
        if step % args.save_every == 0:
            checkpoints.save(engine, step, {"step": step}, wait=False)
        time.sleep(args.pause)
    state = engine.state_dict()
    if rank == 0:
        digest = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
        print(f"finished, parameters {digest.hexdigest()[:16]}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
