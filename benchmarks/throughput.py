"""Compare the engine with a plain PyTorch loop in the same mixed precision if everything fits: GPT-2 124M, bf16.

python benchmarks/throughput.py [--precision bf16] [--batch 1] [--sequence 512] [--rounds 9]
Steps of both alternate in one process, PyTorch with its fused AdamW; the ratio is the median over pairs. Before that,
the losses of a few steps must be bit-identical to those of the reference trainer, whose AdamW is PyTorch's without
fused multiply-adds.
"""

import argparse
import time
from functools import partial
from statistics import median

import torch
from report import publish
from transformers import GPT2LMHeadModel

import patrickstar as ps
from patrickstar._models.presets import PRESETS
from patrickstar.testing import ReferenceTrainer


def build(checkpointing: bool) -> GPT2LMHeadModel:
    config = PRESETS["gpt2-124m"].config()
    config.use_cache = False
    model = GPT2LMHeadModel(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def timed_step(trainer, optimizer, ids) -> tuple[float, float]:
    start = time.perf_counter()
    loss = trainer(input_ids=ids, labels=ids).loss
    trainer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    value = loss.item()
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, value


def run(checkpointing: bool, options: argparse.Namespace) -> list[str]:
    config = ps.Config(device=options.device, precision=options.precision)
    fused = partial(torch.optim.AdamW, lr=config.optimizer.lr, weight_decay=config.optimizer.weight_decay, fused=True)
    torch.manual_seed(0)
    reference = ReferenceTrainer(lambda: build(checkpointing), config)
    torch.manual_seed(0)
    plain_config = ps.Config(device=options.device, precision=options.precision, optimizer=fused)
    plain = ReferenceTrainer(lambda: build(checkpointing), plain_config)
    torch.manual_seed(0)
    engine, optimizer = ps.initialize(lambda: build(checkpointing), config)
    ids = torch.randint(0, 50257, (options.batch, options.sequence), device=engine.device)
    for _ in range(3):  # warm-up, trace, and the first planned step
        _, expected = timed_step(reference, reference.optimizer, ids)
        _, loss = timed_step(engine, optimizer, ids)
        assert loss == expected, f"losses differ: {expected} and {loss}"
        timed_step(plain, plain.optimizer, ids)
    del reference
    pairs = []
    for _ in range(options.rounds):
        plain_s, plain_loss = timed_step(plain, plain.optimizer, ids)
        engine_s, engine_loss = timed_step(engine, optimizer, ids)
        assert abs(plain_loss - engine_loss) < 0.01 * plain_loss, f"losses differ: {plain_loss} and {engine_loss}"
        pairs.append((plain_s, engine_s))
    transferred = engine.stats.last.h2d_bytes + engine.stats.last.d2h_bytes
    engine.close()
    tokens = options.batch * options.sequence
    plain_s, engine_s = median(p for p, _ in pairs), median(e for _, e in pairs)
    ratio = median(p / e for p, e in pairs)
    spread = sorted(p / e for p, e in pairs)
    return [
        "on" if checkpointing else "off",
        f"{tokens / plain_s:,.0f}",
        f"{tokens / engine_s:,.0f}",
        f"{ratio:.3f}",
        f"{spread[0]:.3f} - {spread[-1]:.3f}",
        f"{transferred}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu"], help="on a GPU: make gpu CALLS=steps")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"], help="bf16 needs AVX-512")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    publish(
        "throughput",
        options.device,
        f"GPT-2 124M shape, {options.precision}, {options.batch} x {options.sequence} tokens per step, everything "
        f"fits. Both sides run the same operators, which limits the ratio to 1, except for the update: one pass over "
        f"memory, while plain PyTorch casts before and after its fused AdamW. Goal: at least 0.95. The losses of the "
        f"first steps are bit-identical to the reference.",
        [
            "checkpointing",
            "plain tokens/s",
            "engine tokens/s",
            "ratio (median of pairs)",
            "range",
            "bytes transferred per step",
        ],
        [run(checkpointing, options) for checkpointing in (False, True)],
    )


if __name__ == "__main__":
    main()
