"""Train with Ray Train on several workers, and continue after one of them has failed.

python examples/ray_train.py [--workers 2] [--folder runs/ray] [--steps 30] [--fail-after 12]

The train loop differs from others in the lines of `ps.initialize` and `ps.Checkpoints`: Ray starts the workers and
their process group, and the engine shards the model data over them. With --fail-after the last worker ends after that
step, once. Ray then restarts all workers, which resume from the newest checkpoint; the digest of the parameters at the
end is that of a run without failures.
"""

import argparse
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import nn

import patrickstar as ps


class Model(nn.Module):
    """Perceptron with dropout; returns the loss of reconstructing its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - x).square().mean()


def train(settings: dict[str, Any]) -> None:
    """Train from the newest checkpoint, if there is one, to the last step. Ray calls it in each worker."""
    folder, rank = Path(settings["folder"]), ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    engine, optimizer = ps.initialize(Model, ps.Config(optimizer=ps.AdamW(lr=1e-3), **settings["config"]))
    torch.manual_seed(1 + rank)  # each worker draws its own data and dropout; checkpoints store the generators
    checkpoints = ps.Checkpoints(folder, keep=3)  # on a file system that all machines share
    saved = checkpoints.load(engine)
    for step in range(saved["step"] + 1 if saved else 1, settings["steps"] + 1):
        loss = engine(torch.randn(8, 64))
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        metrics = {"step": step, "loss": engine.average(loss.item())}  # the mean over workers
        if step % 5 == 0:
            checkpoints.save(engine, step, {"step": step})
        if step == settings["fail_after"] and saved is None and rank == engine.world.size - 1:
            os._exit(1)
        ray.train.report(metrics)
    state = engine.state_dict()
    if rank == 0:
        digest = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
        print(f"step {step}  loss {metrics['loss']:.6f}  parameters {digest.hexdigest()[:16]}", flush=True)
    engine.close()


def main(options: Sequence[str] | None = None) -> None:
    """Train in the workers that Ray starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", default="runs/ray", help="folder of the checkpoints, which all workers share")
    parser.add_argument("--steps", type=int, default=30)
    # Libraries need 66 MiB of a GPU's budget.
    smallest = "96MiB" if torch.cuda.is_available() else "1MiB"
    parser.add_argument("--device-memory", default=smallest, help="budget of each worker")
    parser.add_argument("--fail-after", type=int, help="step after which the last worker ends, once")
    args = parser.parse_args(options)

    folder, gpu = Path(args.folder).absolute(), torch.cuda.is_available()
    config = {"device": "cuda" if gpu else "cpu", "precision": "fp32", "device_memory": args.device_memory}
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "folder": str(folder / "checkpoints"),
            "steps": args.steps,
            "config": config,
            "fail_after": args.fail_after,
        },
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers, use_gpu=gpu),
        run_config=ray.train.RunConfig(
            storage_path=str(folder / "ray"), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
