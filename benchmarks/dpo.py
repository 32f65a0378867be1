"""DPO of a 0.7B Llama with its reference model, within a device budget of 2 GiB, a host budget of 4 GiB and a disk.

python benchmarks/dpo.py --directory /scratch [--layers 24]

Weights are random; three steps of one pair of 64 tokens each. The model folder is written by a process of its own, so
that the memory that is measured is that of loading and training. `--directory`: on the disk that the tier uses.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from fresh_processes import apart, resident_peak_bytes
from report import options, publish
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig

import patrickstar as ps
from patrickstar._layout.byte_size import format_size, parse_size
from patrickstar.integrations.trl import DPOTrainer

DEVICE, HOST, SLACK = parse_size("2GiB"), parse_size("4GiB"), parse_size("1GiB")
STEPS, TOKENS, VOCABULARY = 3, 64, 4096


def write_model(folder: Path, layers: int) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 16}
    special = {"pad_token_id": 0, "eos_token_id": 1}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, **sizes, **special)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "w0", "eos_token": "w1", "unk_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def pairs() -> Dataset:
    generator = torch.Generator().manual_seed(0)

    def text(count: int) -> str:
        return " ".join(f"w{n}" for n in torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())

    half = TOKENS // 2 - 1  # and a token for the end
    return Dataset.from_list(
        [{"prompt": text(TOKENS // 2), "chosen": text(half), "rejected": text(half)} for _ in range(STEPS)]
    )


class Timed(DPOTrainer):
    """Trainer that notes the start of each step."""

    started_s = 0.0

    def training_step(self, *args: object, **options: object) -> torch.Tensor:
        self.started_s = time.perf_counter()
        return super().training_step(*args, **options)


def run(folder: Path, directory: Path) -> dict[str, Any]:
    """Train in this process and return the measurements."""
    arguments = DPOConfig(
        str(directory / "run"),
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": "bfloat16"},  # as the folder has it; TRL would load fp32
        per_device_train_batch_size=1,
        max_steps=STEPS,
        max_length=TOKENS,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    config = ps.Config(device_memory=DEVICE, host_memory=HOST, disk=directory)
    trainer = Timed(str(folder), args=arguments, train_dataset=pairs(), config=config)
    trainer.train()
    step_s = time.perf_counter() - trainer.started_s
    engine, total = trainer.engine, trainer.engine.stats.total
    numel = {True: 0, False: 0}
    for param in engine.inspect().parameters:
        numel[param.trained] += param.numel
    engine.close(keep=False)
    return {
        "rss": resident_peak_bytes(),
        "trained": numel[True],
        "frozen": numel[False],
        "step_s": step_s,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "disk": total.disk_read_bytes + total.disk_write_bytes,
    }


def main() -> None:
    given = options(__doc__, directory=Path, layers=24)
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        apart(write_model, Path(folder, "model"), given.layers)
        result = apart(run, Path(folder, "model"), Path(folder))
    limit = DEVICE + HOST + SLACK
    publish(
        "dpo",
        "cpu",
        f"DPO with a reference model, bf16: {result['trained']:,} trained and {result['frozen']:,} frozen parameters; "
        f"device budget {format_size(DEVICE)}, host budget {format_size(HOST)}, disk; {STEPS} steps of one pair of "
        f"{TOKENS} tokens. Model data: 14 bytes per trained parameter and 2 per frozen one. Losses: "
        f"{', '.join(map(str, result['losses']))}.",
        [
            {
                "model data of both models": format_size(14 * result["trained"] + 2 * result["frozen"]),
                "peak RSS": format_size(result["rss"]),
                "limit: budgets + 1 GiB": format_size(limit),
                "bytes of disk per run": format_size(result["disk"]),
                "last step": f"{result['step_s']:.1f} s",
            }
        ],
    )
    assert result["rss"] <= limit, "the process took more than its budgets and 1 GiB"


if __name__ == "__main__":
    main()
