"""The update against the memory it runs in: one AdamW in mixed precision, and the survey of gradients before it.

python benchmarks/adam.py [--numel 10000000 100000000 200000000] [--threads 1 2] [--rounds 7] [--slow-rounds 1]

All sides take turns in one process, on the same tensors: bf16 parameters and gradients, fp32 masters and moments. Each
ratio is the median over rounds of two neighbours' times. DeepSpeed's CPU Adam takes part where it is installed.
"""

import argparse
import ctypes
import threading
import time
from collections.abc import Callable
from statistics import median

import torch
from report import publish

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._memory.memory_meter import ResidentMeter

BYTES_PER_PARAM = 28
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
MEMMOVE = ctypes.CDLL(None).memmove
MEMMOVE.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Work:
    """The tensors of one update, and all who can do it."""

    def __init__(self, numel: int, threads: int) -> None:
        self.numel, self.threads = numel, threads
        self.param16 = torch.full((numel,), 0.01, dtype=torch.bfloat16)
        self.master = torch.nn.Parameter(torch.randn(numel))
        self.grad = torch.zeros(numel)
        self.moments = (torch.zeros(numel), torch.full((numel,), 1e-4))
        kernel = CppBackend.find(threads=threads)
        assert kernel is not None, "this installation has no C++ kernel; see `patrickstar doctor`"
        self.kernel = kernel
        self.step = 0
        self.fused = torch.optim.AdamW([self.master], LR, BETAS, EPS, DECAY, fused=True)
        self.plain = torch.optim.AdamW([self.master], LR, BETAS, EPS, DECAY, foreach=False, fused=False)
        for optimizer in (self.fused, self.plain):
            state = {"step": torch.tensor(1.0), "exp_avg": self.moments[0], "exp_avg_sq": self.moments[1]}
            optimizer.state[self.master].update(state)
        self.deepspeed = deepspeed_adam(self.master)

    def ours(self) -> None:
        self.step += 1
        rule = AdamRule(LR, *BETAS, EPS, DECAY, decoupled=True, step=self.step)
        with torch.no_grad():
            self.kernel.update(
                [Span(self.param16, Gradient(self.param16), self.master.detach(), self.moments, rule)], ()
            )

    def cast(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """The same by an fp32 optimizer: the gradient is cast up, the parameter is cast down."""

        def run() -> None:
            self.master.grad = self.grad.copy_(self.param16)
            optimizer.step()
            with torch.no_grad():
                self.param16.copy_(self.master)

        return run

    def copy(self) -> None:
        """Moments over gradients, by PyTorch."""
        self.grad.copy_(self.moments[0])

    def memmove(self) -> None:
        """The same by the C library, which for this much writes past the caches, in as many threads."""
        share = self.numel * 4 // self.threads
        parts = [
            threading.Thread(
                target=MEMMOVE, args=(self.grad.data_ptr() + n * share, self.moments[0].data_ptr() + n * share, share)
            )
            for n in range(self.threads)
        ]
        for part in parts:
            part.start()
        for part in parts:
            part.join()

    def read(self) -> None:
        self.kernel.read(self.moments[0][: self.numel // 2 * 2].view(torch.int64))

    def grad_stats(self) -> None:
        self.kernel.grad_stats([Gradient(self.param16)], ())


def deepspeed_adam(master: torch.nn.Parameter) -> torch.optim.Optimizer | None:
    """DeepSpeed's CPU Adam, compiled at its first use; None where it is not installed."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    return DeepSpeedCPUAdam([master], LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True)


def timed(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def added_bytes(act: Callable[[], None]) -> int:
    """By how much resident memory rose at most while it ran."""
    meter = ResidentMeter()
    meter.reclaim()
    meter.calibrate(0)
    meter.restart()
    act()
    return max(0, meter.peak(0))


def measure(numel: int, threads: int, options: argparse.Namespace) -> tuple[list[str], list[str]]:
    torch.set_num_threads(threads)
    work = Work(numel, threads)
    sides = {
        "ours": work.ours,
        "copy": work.copy,
        "memmove": work.memmove,
        "read": work.read,
        "survey": work.grad_stats,
    }
    sides["fused"] = work.cast(work.fused)
    if work.deepspeed is not None:
        sides["deepspeed"] = work.cast(work.deepspeed)
    plain = work.cast(work.plain)
    for act in (*sides.values(), work.ours):
        act()
    added = added_bytes(work.ours)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, act in sides.items():
            times[name].append(timed(act))
    slow = [timed(plain) / timed(work.ours) for _ in range(options.slow_rounds)]

    def speed(name: str, nbytes: float) -> float:
        return median(nbytes * numel / seconds / 1e9 for seconds in times[name])

    def ratio(name: str, other: str) -> float:
        return median(a / b for a, b in zip(times[name], times[other], strict=True))

    copied = [min(pair) for pair in zip(times["copy"], times["memmove"], strict=True)]
    share = median(BYTES_PER_PARAM / ours / (8 / copy) for ours, copy in zip(times["ours"], copied, strict=True))
    update = [
        f"{numel / 1e6:.0f}M",
        str(threads),
        f"{speed('ours', BYTES_PER_PARAM):.1f}",
        f"{speed('copy', 8):.1f}",
        f"{speed('memmove', 8):.1f}",
        f"{share:.2f}",
        f"{ratio('fused', 'ours'):.2f}",
        f"{median(slow):.1f}",
        f"{ratio('deepspeed', 'ours'):.2f}" if "deepspeed" in times else "not installed",
        f"{added / 2**20:.1f} MiB",
    ]
    reading = median(
        2 / grad_stats / (4 / read) for grad_stats, read in zip(times["survey"], times["read"], strict=True)
    )
    grad_stats = [update[0], update[1], f"{speed('grad_stats', 2):.1f}", f"{speed('read', 4):.1f}", f"{reading:.2f}"]
    return update, grad_stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, nargs="+", default=[10_000_000, 100_000_000, 200_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slow-rounds", type=int, default=1)
    options = parser.parse_args()
    rows = [measure(numel, threads, options) for numel in options.numel for threads in options.threads]
    kernel = CppBackend.find()
    publish(
        "adam",
        "cpu",
        f"One AdamW update, {kernel.name if kernel else ''}: bf16 gradient read, fp32 master and moments read and "
        f"written, bf16 parameter written: {BYTES_PER_PARAM} bytes per parameter, which is the physical limit. Copying "
        f"counts 2 bytes for each byte copied; where the processor first reads what it is about to overwrite (write "
        f"allocation), 3 cross the bus, so an update, which reads all that it writes, can be faster than a copy. "
        f"PyTorch's `copy_` and the C library's `memmove`, which avoids that, are both run, and the share is of the "
        f"faster one. Ratios are times of the others by ours; they do the same work by casting up, an fp32 step, and "
        f"casting down, which is 46 bytes per parameter with write allocation: where both sides are as fast as memory, "
        f"the ratio is 46 / 28 = 1.64. Goals: share at least 0.9, fused at least 1.6, plain (`foreach=False, "
        f"fused=False`) at least 8, DeepSpeed at least 1.6. Added is the rise of resident memory during an update.",
        [
            "parameters",
            "threads",
            "update GB/s",
            "copy_ GB/s",
            "memmove GB/s",
            "share",
            "torch fused / ours",
            "torch plain / ours",
            "DeepSpeed / ours",
            "added",
        ],
        [update for update, _ in rows],
    )
    publish(
        "survey",
        "cpu",
        "The pass over bf16 gradients for their norm (squares summed in fp64, in fixed order) and for values that are "
        "not finite: 2 bytes read per parameter. The physical limit is the speed of reading alone, measured beside it. "
        "Goal: share at least 0.9.",
        ["parameters", "threads", "survey GB/s", "read GB/s", "share"],
        [grad_stats for _, grad_stats in rows],
    )


if __name__ == "__main__":
    main()
