"""Compare plans of LoRA and QLoRA with runs on this machine, over random Llamas.

python benchmarks/adapter_plans.py [--draws 20] [--seed 0]
Each draw is planned in one process, then trained in another. Times are medians of steps 4 to 8, bytes of a step.
"""

import random
import tempfile
import time
import warnings
from functools import partial
from statistics import median

import peft
import torch
from fresh_processes import apart
from report import options, publish
from steps import checkpointed, seconds_of, train_step
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import patrickstar as ps
from patrickstar._dry_run.machine_profile import profile_machine

STEPS, TIMED = 8, 5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BYTES = ("device_peak_model_bytes", "host_peak_model_bytes", "h2d_bytes", "d2h_bytes")


def draws(count: int, seed: int) -> list[dict]:
    chosen = random.Random(seed)
    return [
        {
            "layers": chosen.randint(2, 6),
            "hidden": chosen.choice([256, 512, 768]),
            "vocab": chosen.choice([4096, 16384]),
            "batch": chosen.randint(1, 4),
            "sequence": chosen.choice([128, 256]),
            "rank": chosen.choice([4, 16, 64]),
            "quantized": chosen.random() < 0.5,
            "checkpointing": chosen.random() < 0.5,
        }
        for _ in range(count)
    ]


def with_adapters(config: LlamaConfig, precision: str, rank: int, quantized: bool) -> torch.nn.Module:
    """Return a Llama as a user builds it: with peft, and loaded in 4 bits by transformers if it is quantized."""
    torch.manual_seed(0)
    dtype = DTYPES[precision]
    base = LlamaForCausalLM(config).to(dtype)
    if quantized:
        with tempfile.TemporaryDirectory() as folder:
            base.save_pretrained(folder)
            in_4bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
            base = LlamaForCausalLM.from_pretrained(
                folder, dtype=dtype, quantization_config=in_4bit, device_map={"": "cpu"}
            )
    adapters = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(base, adapters).train()


def build(draw: dict) -> torch.nn.Module:
    hidden = draw["hidden"]
    config = LlamaConfig(
        vocab_size=draw["vocab"],
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=draw["layers"],
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        use_cache=False,
    )
    return with_adapters(config, draw["precision"], draw["rank"], draw["quantized"])


def sample(batch: int, sequence: int, vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(batch * sequence).view(batch, sequence) % vocabulary
    return {"input_ids": ids, "labels": ids.clone()}


def batch_of(draw: dict) -> dict[str, torch.Tensor]:
    return sample(draw["batch"], draw["sequence"], draw["vocab"])


def predict(draw: dict) -> dict:
    torch.set_num_threads(draw["threads"])
    machine = profile_machine(torch.device("cpu"))
    # What is free differs between the processes, and each step fits by far.
    machine = machine.model_copy(update={"host": machine.host.model_copy(update={"memory": 1 << 31})})
    plan = ps.plan(
        build(draw),
        machine=machine,
        sample=batch_of(draw),
        batch=draw["batch"],
        activation_checkpointing=draw["checkpointing"],
        precision=draw["precision"],
    )
    report = plan.dry_run
    return {
        "seconds": report.seconds,
        "model_data": plan.best.model_data_bytes,
        "budgets": (report.device_budget_bytes, report.host_budget_bytes),
        **{name: getattr(report.stats, name) for name in BYTES},
    }


def train(draw: dict) -> dict:
    torch.set_num_threads(draw["threads"])
    model = build(draw)
    if draw["checkpointing"]:
        checkpointed(model)
    device, host = draw["budgets"]
    config = ps.Config(device="cpu", precision=draw["precision"], device_memory=device, host_memory=host)
    ids = batch_of(draw)["input_ids"]
    clock = time.process_time if draw["threads"] == 1 else time.perf_counter
    with ps.Engine(model, config) as engine:
        seconds = [seconds_of(partial(train_step, engine, ids), clock) for _ in range(STEPS)]
        payload = sum(chunk.nbytes for chunk in engine.inspect().chunks) - engine.layout.padding_bytes
        last = engine.stats.last
    moved = {name: getattr(last, name) for name in BYTES}
    return {"seconds": median(seconds[-TIMED:]), "model_data": payload} | moved


def main() -> None:
    given = options(__doc__, draws=20, seed=0, precision="fp32", threads=1)
    warnings.simplefilter("ignore")
    rows, errors, differing = [], [], 0
    for draw in draws(given.draws, given.seed):
        draw |= {"precision": given.precision, "threads": given.threads}
        predicted = apart(predict, draw)
        actual = apart(train, draw | {"budgets": predicted["budgets"]})
        errors.append(predicted["seconds"] / actual["seconds"] - 1)
        equal = all(predicted[name] == actual[name] for name in ("model_data", *BYTES))
        differing += not equal
        rows.append(
            {
                "layers x hidden, vocabulary": f"{draw['layers']} x {draw['hidden']}, {draw['vocab']:,}",
                "adapters": f"{'QLoRA' if draw['quantized'] else 'LoRA'}, rank {draw['rank']}",
                "batch": f"{draw['batch']} x {draw['sequence']}{', checkpointing' if draw['checkpointing'] else ''}",
                "predicted": f"{predicted['seconds']:.3f} s",
                "measured": f"{actual['seconds']:.3f} s",
                "error": f"{100 * errors[-1]:+.0f} %",
                "model data, bytes": f"{actual['model_data']:,}",
                "bytes": "equal" if equal else "other",
            }
        )
        print(list(rows[-1].values()), flush=True)
    publish(
        "adapter_plans",
        f"Plan / run of LoRA and QLoRA: {len(rows)} random Llamas in {given.precision}, threads: {given.threads} (seed "
        f"{given.seed}). Absolute error of the step time: {100 * median(map(abs, errors)):.1f} % in the median, "
        f"{100 * max(map(abs, errors)):.1f} % at most (limit 15 %). Bytes of model data, peaks and transfers differ in "
        f"{differing} draws (limit 0). With one thread seconds are those of the processor.",
        rows,
    )


if __name__ == "__main__":
    main()
