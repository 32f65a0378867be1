"""Train a small GPT-2 on the standard library's sources with accelerate's loop, within a memory budget.

python examples/accelerate_loop.py [--device-memory 56MiB] [--steps 60] [--save runs/accelerate] [--resume]
Several processes: torchrun --nproc-per-node 2 examples/accelerate_loop.py

A script for accelerate differs in two lines: the import of `Accelerator`, and `config` with the budget. Model data take
164 MiB in fp32; the device budget holds a part of them, so chunks are evicted in every step.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from patrickstar.integrations.accelerate import Accelerator


def byte_blocks(length: int, count: int) -> torch.Tensor:
    """Return at most `count` blocks of the sources, each of `length` bytes; one byte is one token."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > length * count:
            break
    tokens = torch.frombuffer(text, dtype=torch.uint8).long()
    return tokens[: len(tokens) // length * length].view(-1, length)[:count]


def main(options: Sequence[str] | None = None) -> list[float]:
    """Train, print losses and memory figures, and return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # Libraries need 66 MiB of a GPU's budget.
    smallest = "160MiB" if torch.cuda.is_available() else "56MiB"
    parser.add_argument("--device-memory", default=smallest)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save", default="runs/accelerate", help="folder of the saved state")
    parser.add_argument("--resume", action="store_true", help="load the state from the folder first")
    args = parser.parse_args(options)

    accelerator = Accelerator(
        config={"device_memory": args.device_memory},
        gradient_accumulation_steps=2,
        cpu=not torch.cuda.is_available(),
    )
    set_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=384, n_layer=6, n_head=6, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 5, 100)
    loader = DataLoader(byte_blocks(length=128, count=4000), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.resume:
        accelerator.load_state(args.save)

    losses: list[float] = []
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            losses.append(accelerator.gather(loss.detach()).mean().item())
            accelerator.print(f"step {len(losses)}: loss {losses[-1]:.3f}")
        if len(losses) == args.steps:
            break
    accelerator.save_state(args.save)
    stats = accelerator.engine.stats.total
    accelerator.print(
        f"peak of model data on the device: {stats.device_peak_model_bytes / 2**20:.1f} MiB of {args.device_memory}; "
        f"{stats.evictions} chunks were evicted"
    )
    accelerator.free_memory()
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
