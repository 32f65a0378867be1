"""Measure the overhead of accelerate's loop on the engine against the engine's own loop.

python benchmarks/accelerate_loop.py [--device cpu] [--model gpt-40m] [--batch 1] [--sequence 512] [--rounds 31]
Two engines of one model alternate in one process: each step of accelerate's loop is followed by a step of the engine's.
A step of accelerate's loop includes the data loader. Both clip gradients and step a learning-rate schedule, and their
losses must be bit-identical.
"""

import argparse
import time

import torch
from torch.utils.data import DataLoader
from trainer import WARM_UP, Loop, build, compare

from patrickstar._models.presets import PRESETS
from patrickstar.integrations.accelerate import Accelerator


def run(options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the seconds of a step of accelerate's loop and of the engine's, in pairs."""
    steps = WARM_UP + options.rounds
    vocabulary = PRESETS[options.model].config().vocab_size
    ids = torch.randint(0, vocabulary, (steps * options.batch, options.sequence))
    examples = [{"input_ids": row, "labels": row} for row in ids]
    accelerator = Accelerator(cpu=options.device == "cpu", mixed_precision="bf16")
    model = build(options.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(examples, batch_size=options.batch)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    # One group with all parameters, as above.
    loop = Loop(options, None)
    pairs = []
    start = time.perf_counter()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch, num_items_in_batch=batch["labels"][:, 1:].numel()).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        value, step_end = loss.item(), time.perf_counter()
        assert value == loop.step(batch), "losses differ"
        now = time.perf_counter()
        pairs.append((step_end - start, now - step_end))
        start = now
    assert len(pairs) == steps
    loop.engine.close(keep=False)
    accelerator.free_memory()
    return pairs


if __name__ == "__main__":
    compare("accelerate_loop", "accelerate's loop", __doc__, "clipping", run)
