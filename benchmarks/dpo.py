"""DPO of a 0.7B Llama with its reference model, within a device budget of 2 GiB, a host budget of 4 GiB and a disk.

python benchmarks/dpo.py --directory /scratch [--layers 24]

Weights are random; three steps of one pair of 64 tokens each. The model folder is written by a process of its own, so
that the memory that is measured is that of loading and training.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from report import publish
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig

import patrickstar as ps
from patrickstar._layout.byte_size import format_size, parse_size
from patrickstar.integrations.trl import DPOTrainer

DEVICE, HOST, SLACK = parse_size("2GiB"), parse_size("4GiB"), parse_size("1GiB")
STEPS, TOKENS, VOCABULARY = 3, 64, 4096


def write_model(folder: Path, layers: int) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokens = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="w0", eos_token="w1", unk_token="w2").save_pretrained(
        folder
    )


def pairs() -> Dataset:
    generator = torch.Generator().manual_seed(0)

    def text(count: int) -> str:
        return " ".join(f"w{n}" for n in torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())

    half = TOKENS // 2 - 1  # and a token for the end
    return Dataset.from_list(
        [{"prompt": text(TOKENS // 2), "chosen": text(half), "rejected": text(half)} for _ in range(STEPS)]
    )


def run(folder: Path, directory: Path) -> dict[str, object]:
    """Train in this process and return the measurements."""
    seconds: list[float] = []

    class Timed(DPOTrainer):
        def training_step(self, *args: object, **options: object) -> torch.Tensor:
            seconds.append(time.perf_counter())
            return super().training_step(*args, **options)

    trainer = Timed(
        str(folder),
        args=DPOConfig(
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
        ),
        train_dataset=pairs(),
        config=ps.Config(device_memory=DEVICE, host_memory=HOST, disk=directory),
    )
    trainer.train()
    ended = time.perf_counter()
    engine, total = trainer.engine, trainer.engine.stats.total
    parameters = engine.inspect().parameters
    result = {
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "trained": sum(each.numel for each in parameters if each.trained),
        "frozen": sum(each.numel for each in parameters if not each.trained),
        "step_s": ended - seconds[-1],
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "disk": total.disk_read_bytes + total.disk_write_bytes,
    }
    engine.close(keep=False)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="on the disk that the tier uses")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--step", choices=["write", "run"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step == "write":
        write_model(options.directory / "model", options.layers)
        return
    if options.step == "run":
        print(json.dumps(run(options.directory / "model", options.directory)))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        command = [sys.executable, __file__, "--directory", folder, "--layers", str(options.layers), "--step"]
        subprocess.run([*command, "write"], check=True)
        done = subprocess.run([*command, "run"], check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    data = 14 * result["trained"] + 2 * result["frozen"]
    publish(
        "dpo",
        "cpu",
        f"DPO with a reference model, bf16: {result['trained']:,} trained and {result['frozen']:,} frozen parameters; "
        f"device budget {format_size(DEVICE)}, host budget {format_size(HOST)}, disk; {STEPS} steps of one pair of "
        f"{TOKENS} tokens. Model data: 14 bytes per trained parameter and 2 per frozen one. Losses: "
        f"{', '.join(map(str, result['losses']))}.",
        ["model data of both models", "peak RSS", "limit: budgets + 1 GiB", "bytes of disk per run", "last step"],
        [
            [
                format_size(data),
                format_size(result["rss"]),
                format_size(DEVICE + HOST + SLACK),
                format_size(result["disk"]),
                f"{result['step_s']:.1f} s",
            ]
        ],
    )
    assert result["rss"] <= DEVICE + HOST + SLACK, "the process took more than its budgets and 1 GiB"


if __name__ == "__main__":
    main()
