"""Train a small GPT-2 on the standard library's sources with transformers' Trainer, within a memory budget.

python examples/trainer.py [--output runs/trainer] [--device-memory 56MiB] [--steps 60] [--lora] [--resume]
Several processes: torchrun --nproc-per-node 2 examples/trainer.py

A script for transformers' own Trainer differs in two lines: the import of `Trainer`, and `config` with the budget.
Model data take 164 MiB in fp32; the device budget holds a part of them, so chunks are evicted in every step.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import patrickstar as ps
from patrickstar.integrations.transformers import Trainer


def byte_blocks(length: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Return at most `count` blocks of the sources, each of `length` bytes; one byte is one token."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > length * count:
            break
    tokens = torch.frombuffer(text, dtype=torch.uint8).long()
    blocks = tokens[: len(tokens) // length * length].view(-1, length)[:count]
    return [{"input_ids": block, "labels": block} for block in blocks]


def main(options: Sequence[str] | None = None) -> float:
    """Train, print memory figures, and return the evaluation loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/trainer")
    # Libraries need 66 MiB of a GPU's budget.
    smallest = "160MiB" if torch.cuda.is_available() else "56MiB"
    parser.add_argument("--device-memory", default=smallest)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters with PEFT; the base model is frozen")
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in the output folder")
    args = parser.parse_args(options)

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=384, n_layer=6, n_head=6, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    model.activation_checkpointing_enable()
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    data = byte_blocks(length=128, count=4000)
    trainer = Trainer(
        model,
        TrainingArguments(
            args.output,
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=4,
            max_steps=args.steps,
            learning_rate=1e-3,
            warmup_steps=10,
            lr_scheduler_type="cosine",
            logging_steps=10,
            save_steps=max(1, args.steps // 2),
            save_total_limit=2,
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=data[:-32],
        eval_dataset=data[-32:],
        config=ps.Config(device_memory=args.device_memory),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    loss: float = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    stats = trainer.engine.stats.total
    if trainer.is_world_process_zero():
        print(
            f"evaluation loss {loss:.3f}; peak of model data on the device: "
            f"{stats.device_peak_model_bytes / 2**20:.1f} MiB; {stats.evictions} chunks were evicted"
        )
    trainer.engine.close(keep=False)
    return loss


if __name__ == "__main__":
    main()
