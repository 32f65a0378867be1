"""transformers' Trainer on the engine: a small GPT-2 learns the Python standard library's sources, byte by byte.

python examples/trainer.py [--output runs/trainer] [--device-memory 96MiB] [--steps 60] [--lora] [--resume]
Several processes: torchrun --nproc-per-node 2 examples/trainer.py
What differs from a script for transformers' own Trainer is one import, and the budget.
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import patrickstar as ps
from patrickstar.integrations.transformers import Trainer


def blocks(length: int, most: int) -> list[dict[str, torch.Tensor]]:
    """The sources as blocks of bytes, a token each."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) > length * most:
            break
    tokens = torch.frombuffer(text, dtype=torch.uint8).long()
    found = tokens[: len(tokens) // length * length].view(-1, length)[:most]
    return [{"input_ids": block, "labels": block} for block in found]


def main(options: Sequence[str] | None = None) -> float:
    """Train; returns the loss on what was kept aside."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/trainer")
    parser.add_argument("--device-memory", default="96MiB")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lora", action="store_true", help="train adapters of PEFT, on a base that stays as it is")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    given = parser.parse_args(options)

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    if given.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    data = blocks(length=128, most=4000)
    trainer = Trainer(
        model,
        TrainingArguments(
            given.output,
            use_cpu=not torch.cuda.is_available(),
            bf16=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=given.steps,
            learning_rate=1e-3,
            warmup_steps=10,
            lr_scheduler_type="cosine",
            logging_steps=10,
            save_steps=max(1, given.steps // 2),
            save_total_limit=2,
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        train_dataset=data[:-32],
        eval_dataset=data[-32:],
        config=ps.Config(device_memory=given.device_memory),
    )
    trainer.train(resume_from_checkpoint=given.resume)
    loss: float = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    stats = trainer.engine.stats.total
    if trainer.is_world_process_zero():
        print(
            f"loss on what was kept aside: {loss:.3f}; parameters and gradients on the device took "
            f"{stats.device_peak_model_bytes / 2**20:.1f} MiB at most, {stats.evictions} chunks left it"
        )
    trainer.engine.close(keep=False)
    return loss


if __name__ == "__main__":
    main()
