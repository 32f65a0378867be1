"""Compare the mixed-precision AdamW update and the gradient statistics with memory bandwidth and other implementations.

python benchmarks/adam.py [--numel 10000000 100000000 200000000] [--threads 1 2] [--rounds 7] [--slow-rounds 1]
    [--average 64000000]

All implementations alternate in one process on the same tensors: bf16 parameters and gradients, fp32 masters and
moments. Each ratio is the median over rounds of two adjacent times. DeepSpeed's CPU Adam is included if installed.
`--average` measures an update of so many elements with and without a moving average of the parameters instead.
"""

import argparse
import ctypes
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from report import options, publish
from steps import alternating, in_threads, ratio_of, seconds_of

from patrickstar._hardware.memory_meter import ResidentMeter
from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.averaged import AveragedRule
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient, Span

BYTES_PER_PARAM, AVERAGE_BYTES = 28, 8
"""Bytes per parameter that an AdamW update moves, and that a moving average adds."""
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
MEMMOVE = ctypes.CDLL(None).memmove
MEMMOVE.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Work:
    """Tensors of one update and all implementations of it."""

    def __init__(self, numel: int, threads: int) -> None:
        self.numel, self.threads = numel, threads
        self.param16 = torch.full((numel,), 0.01, dtype=torch.bfloat16)
        self.master = torch.nn.Parameter(torch.randn(numel))
        self.grad = torch.zeros(numel)
        self.moments = (torch.zeros(numel), torch.full((numel,), 1e-4))
        self.param_elsewhere = torch.zeros_like(self.param16)
        self.elsewhere = tuple(torch.zeros(numel) for _ in range(1 + len(self.moments)))
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
        self.update(self.param16)

    def out_of_place(self) -> None:
        """Write the new parameter, master and moments to other memory."""
        self.update(self.param_elsewhere, self.elsewhere)

    def update(self, param: torch.Tensor, out: tuple[torch.Tensor, ...] | None = None) -> None:
        self.step += 1
        rule = AdamRule(LR, *BETAS, EPS, DECAY, decoupled=True, step=self.step)
        with torch.no_grad():
            span = Span(param, Gradient(self.param16), self.master.detach(), self.moments, rule, out)
            self.kernel.update([span], ())

    def cast(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Return the same update by an fp32 optimizer, with an upcast gradient and a downcast parameter."""

        def run() -> None:
            self.master.grad = self.grad.copy_(self.param16)
            optimizer.step()
            with torch.no_grad():
                self.param16.copy_(self.master)

        return run

    def copy(self) -> None:
        """Copy moments over gradients with PyTorch."""
        self.grad.copy_(self.moments[0])

    def memmove(self) -> None:
        """Copy with the C library, whose large copies bypass the caches, in the same number of threads."""
        share = self.numel * 4 // self.threads
        starts = [
            (self.grad.data_ptr() + n * share, self.moments[0].data_ptr() + n * share) for n in range(self.threads)
        ]
        in_threads(partial(MEMMOVE, *start, share) for start in starts)

    def read(self) -> None:
        self.kernel.read(self.moments[0][: self.numel // 2 * 2].view(torch.int64))

    def grad_stats(self) -> None:
        self.kernel.grad_stats([Gradient(self.param16)], ())


def deepspeed_adam(master: torch.nn.Parameter) -> torch.optim.Optimizer | None:
    """Return DeepSpeed's CPU Adam, compiled at its first use; None if it is not installed."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    return DeepSpeedCPUAdam([master], LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True)


def added_bytes(action: Callable[[], None]) -> int:
    """Return the peak rise of resident memory during an action."""
    meter = ResidentMeter()
    meter.reclaim()
    meter.calibrate(0)
    meter.restart()
    action()
    return max(0, meter.peak(0))


def measure(numel: int, threads: int, given: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Return a row of the table of updates, and one of the table of gradient statistics."""
    torch.set_num_threads(threads)
    work = Work(numel, threads)
    names = ("ours", "out_of_place", "copy", "memmove", "read", "grad_stats")
    sides = {name: getattr(work, name) for name in names} | {"fused": work.cast(work.fused)}
    if work.deepspeed is not None:
        sides["deepspeed"] = work.cast(work.deepspeed)
    plain = work.cast(work.plain)
    for action in (*sides.values(), work.ours):
        action()
    added = added_bytes(work.ours)
    times = alternating(sides, given.rounds, warm_up=0)
    slow = [seconds_of(plain) / seconds_of(work.ours) for _ in range(given.slow_rounds)]

    def speed(name: str, nbytes: float) -> str:
        return f"{median(nbytes * numel / seconds / 1e9 for seconds in times[name]):.1f}"

    def ratio(name: str, other: str = "ours") -> str:
        return f"{ratio_of(times[name], times[other]):.2f}"

    copies = [min(pair) for pair in zip(times["copy"], times["memmove"], strict=True)]
    share = median(BYTES_PER_PARAM / ours / (8 / copy) for ours, copy in zip(times["ours"], copies, strict=True))
    case = {"parameters": f"{numel / 1e6:.0f}M", "threads": str(threads)}
    update = case | {
        "update GB/s": speed("ours", BYTES_PER_PARAM),
        "out of place GB/s": speed("out_of_place", BYTES_PER_PARAM),
        "out of place / ours": ratio("out_of_place"),
        "copy_ GB/s": speed("copy", 8),
        "memmove GB/s": speed("memmove", 8),
        "share": f"{share:.2f}",
        "torch fused / ours": ratio("fused"),
        "torch plain / ours": f"{median(slow):.1f}",
        "DeepSpeed / ours": ratio("deepspeed") if "deepspeed" in times else "not installed",
        "added": f"{added / 2**20:.1f} MiB",
    }
    rates = {"grad_stats GB/s": speed("grad_stats", 2), "read GB/s": speed("read", 4)}
    return update, case | rates | {"share": f"{ratio_of(times['read'], times['grad_stats']) / 2:.2f}"}


def publish_average(numel: int, rounds: int) -> None:
    """Publish an update with and without a moving average of the parameters (ps.EMA)."""
    param = torch.full((numel,), 0.01, dtype=torch.bfloat16)
    master, exp_avg, exp_avg_sq, ema = (torch.full((numel,), 1e-3) for _ in range(4))
    kernels = Kernels.best(torch.device("cpu"))
    plain = AdamRule(LR, *BETAS, EPS, DECAY, decoupled=True, step=3)
    cases = {
        "AdamW": (plain, (exp_avg, exp_avg_sq), BYTES_PER_PARAM),
        "AdamW and average": (AveragedRule(plain, 0.001), (exp_avg, exp_avg_sq, ema), BYTES_PER_PARAM + AVERAGE_BYTES),
    }
    spans = {name: Span(param, Gradient(param), master, states, rule) for name, (rule, states, _) in cases.items()}
    times = alternating({name: lambda span=span: kernels.update([span], ()) for name, span in spans.items()}, rounds)
    publish(
        "average",
        f"AdamW update of {numel:,} parameters with and without a moving average, {torch.get_num_threads()} threads, "
        f"median of {rounds} rounds. The limit is the ratio of the bytes moved.",
        [
            {
                "update": name,
                "seconds": f"{median(times[name]):.4f}",
                "GB/s": f"{nbytes * numel / median(times[name]) / 1e9:.1f}",
                "ratio": f"{ratio_of(times[name], times['AdamW']):.3f}",
                "limit": f"{nbytes / BYTES_PER_PARAM:.3f}",
            }
            for name, (_, _, nbytes) in cases.items()
        ],
    )


def main() -> None:
    sizes = [10_000_000, 100_000_000, 200_000_000]
    given = options(__doc__, numel=sizes, threads=[1, 2], rounds=7, slow_rounds=1, average=0)
    if given.average:
        publish_average(given.average, given.rounds)
        return
    rows = [measure(numel, threads, given) for numel in given.numel for threads in given.threads]
    kernel = CppBackend.find()
    publish(
        "adam",
        f"One AdamW update, {kernel.name if kernel else ''}: read the bf16 gradient, read and write fp32 master and "
        f"moments, write the bf16 parameter: {BYTES_PER_PARAM} bytes per parameter, the physical minimum. A copy "
        f"counts 2 bytes per byte copied. With write allocation, where the CPU first reads the memory it overwrites, 3 "
        f"bytes cross the bus, so an update, which reads everything it writes, can be faster than a copy. PyTorch's "
        f"`copy_` and the C library's `memmove`, which avoids write allocation, are both measured; the share is "
        f"relative to the faster one. Ratios are times of other implementations / ours. The others upcast, run an fp32 "
        f"step and downcast: 46 bytes per parameter with write allocation. If both sides run at memory bandwidth, the "
        f"ratio is 46 / 28 = 1.64. Goals: share at least 0.9, fused at least 1.6, plain (`foreach=False, fused=False`) "
        f"at least 8, DeepSpeed at least 1.6. Out of place: the same update into other memory, with non-temporal "
        f"stores, so its minimum is {BYTES_PER_PARAM} bytes too. Added: rise of resident memory during an update.",
        [update for update, _ in rows],
    )
    publish(
        "grad_stats",
        "Gradient statistics: one pass over bf16 gradients for their norm (squares summed in fp64, in a fixed order) "
        "and for non-finite values, which reads 2 bytes per parameter. The physical limit is the read bandwidth, "
        "measured in the same process. Goal: share at least 0.9.",
        [grad_stats for _, grad_stats in rows],
    )


if __name__ == "__main__":
    main()
