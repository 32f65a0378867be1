"""Compare an AdamW update with and without a moving average of the parameters (ps.EMA), in one process.

python benchmarks/average.py [--numel 64000000] [--rounds 15]
bf16 parameters and gradients, fp32 masters and states. Both updates alternate; each ratio is the median over rounds of
two adjacent times. The limit is the ratio of the bytes that both move.
"""

import argparse
import time
from statistics import median

import torch
from report import publish

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.averaged import AveragedRule
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Span

BYTES, AVERAGE_BYTES = 28, 8
"""Bytes per parameter that an AdamW update moves, and that an average adds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=64_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    param = torch.full((options.numel,), 0.01, dtype=torch.bfloat16)
    master, exp_avg, exp_avg_sq, ema = (torch.full((options.numel,), 1e-3) for _ in range(4))
    kernels = Kernels.best(torch.device("cpu"))
    plain = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, step=3)
    spans = {
        "AdamW": Span(param, Gradient(param), master, (exp_avg, exp_avg_sq), plain),
        "AdamW and average": Span(
            param, Gradient(param), master, (exp_avg, exp_avg_sq, ema), AveragedRule(plain, 0.001)
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in spans}
    for _ in range(options.rounds + 1):
        for name, span in spans.items():
            start = time.perf_counter()
            kernels.update([span], ())
            seconds[name].append(time.perf_counter() - start)
    first, second = (times[1:] for times in seconds.values())
    ratio = median(with_average / without for without, with_average in zip(first, second, strict=True))
    publish(
        "average",
        "cpu",
        f"AdamW update of {options.numel:,} parameters with and without a moving average, {torch.get_num_threads()} "
        f"threads, median of {options.rounds} rounds. The limit is the ratio of the bytes moved.",
        ["update", "seconds", "GB/s", "ratio", "limit"],
        [
            ["AdamW", f"{median(first):.4f}", f"{BYTES * options.numel / median(first) / 1e9:.1f}", "1", "1"],
            [
                "AdamW and average",
                f"{median(second):.4f}",
                f"{(BYTES + AVERAGE_BYTES) * options.numel / median(second) / 1e9:.1f}",
                f"{ratio:.3f}",
                f"{(BYTES + AVERAGE_BYTES) / BYTES:.3f}",
            ],
        ],
    )


if __name__ == "__main__":
    main()
