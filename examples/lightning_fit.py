"""Train a small GPT-2 on the standard library's sources with Lightning's Trainer, within a memory budget.

python examples/lightning_fit.py [--output runs/lightning] [--device-memory 56MiB] [--steps 40] [--devices 1] [--resume]

A script for Lightning's own strategies differs in one argument of its Trainer: `strategy`. Model data take 164 MiB in
fp32; the device budget holds a part of them.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from patrickstar.integrations.lightning import PatrickStarStrategy


def byte_blocks(length: int, count: int) -> torch.Tensor:
    """Return at most `count` blocks of the sources, each of `length` bytes; one byte is one token."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > length * count:
            break
    tokens = torch.frombuffer(text, dtype=torch.uint8).long()
    return tokens[: len(tokens) // length * length].view(-1, length)[:count]


class LanguageModel(lightning.LightningModule):
    """GPT-2 over bytes."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=256, n_positions=128, n_embd=384, n_layer=6, n_head=6, bos_token_id=0, eos_token_id=0
        )
        self.gpt = GPT2LMHeadModel(config)
        self.gpt.loss_type = "ForCausalLM"
        self.gpt.activation_checkpointing_enable()

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(input_ids=batch, labels=batch).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def main(options: Sequence[str] | None = None) -> float:
    """Train, print memory figures, and return the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/lightning")
    # Libraries need 66 MiB of a GPU's budget.
    smallest = "160MiB" if torch.cuda.is_available() else "56MiB"
    parser.add_argument("--device-memory", default=smallest)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--devices", type=int, default=1, help="number of processes, each with a shard of the model")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in the output folder")
    args = parser.parse_args(options)

    torch.manual_seed(0)
    model, saving = LanguageModel(), ModelCheckpoint(args.output, save_last=True, save_top_k=0)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=args.devices,
        strategy=PatrickStarStrategy({"device_memory": args.device_memory}),
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        max_steps=args.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[saving],
        log_every_n_steps=1,
        logger=False,
    )
    last = str(Path(args.output) / "last.ckpt") if args.resume else None
    trainer.fit(model, DataLoader(byte_blocks(128, 4000), batch_size=1), ckpt_path=last, weights_only=False)
    loss = float(trainer.callback_metrics["loss"])
    stats = trainer.strategy.engine.stats.total
    if trainer.is_global_zero:
        print(
            f"loss {loss:.3f}; peak of model data on the device: {stats.device_peak_model_bytes / 2**20:.1f} MiB; "
            f"{stats.evictions} chunks were evicted"
        )
    return loss


if __name__ == "__main__":
    main()
