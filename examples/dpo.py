"""Prefer short lines of the standard library to long ones, with DPO and its reference model under one budget.

python examples/dpo.py [--output runs/dpo] [--device-memory 96MiB] [--steps 20]

A script for TRL's own trainer differs in two lines: the import of `DPOTrainer`, and `config` with the budget. The
reference model is a copy of the trained one; both lie in chunks.
"""

import argparse
import copy
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig

import patrickstar as ps
from patrickstar.integrations.trl import DPOTrainer

SPECIAL = ["<pad>", "<eos>", "<unk>"]


def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each character."""
    words = [*SPECIAL, *(chr(code) for code in range(32, 127))]
    tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def lines() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for line in path.read_text(encoding="utf-8", errors="ignore").splitlines():
            if 8 <= len(line.strip()) <= 60:
                yield line.strip()


def main(options: Sequence[str] | None = None) -> float:
    """Train, print memory figures, and return the last margin between the rewards of chosen and rejected lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/dpo")
    # Libraries need 66 MiB of a GPU's budget.
    smallest = "192MiB" if torch.cuda.is_available() else "96MiB"
    parser.add_argument("--device-memory", default=smallest)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(options)

    torch.manual_seed(0)
    tokenizer = ascii_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=6,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    found = [line for line, _ in zip(lines(), range(4 * args.steps * 8), strict=False)]
    pairs = [
        {"prompt": "# ", "chosen": min(two, key=len), "rejected": max(two, key=len)}
        for two in zip(found[::2], found[1::2], strict=True)
        if len(two[0]) != len(two[1])
    ]
    trainer = DPOTrainer(
        model,
        ref_model=copy.deepcopy(model),
        args=DPOConfig(
            args.output,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,  # TRL's default is True; without it the precision is the one that is fast here
            per_device_train_batch_size=2,
            max_steps=args.steps,
            max_length=64,
            learning_rate=3e-4,
            activation_checkpointing=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=torch.cuda.is_available(),
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(pairs),
        config=ps.Config(device_memory=args.device_memory),
    )
    trainer.train()
    margin: float = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry][-1]
    stats, engine = trainer.engine.stats.total, trainer.engine
    reference = sum(each.numel for each in engine.inspect().parameters if not each.trained)
    print(
        f"margin {margin:.3f}; {reference:,} parameters of the reference model in chunks; peak of model data on the "
        f"device: {stats.device_peak_model_bytes / 2**20:.1f} MiB; {stats.evictions} chunks were evicted"
    )
    engine.close(keep=False)
    return margin


if __name__ == "__main__":
    main()
