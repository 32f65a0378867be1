"""Compare the mixed-precision AdamW update and the gradient statistics with memory bandwidth and other implementations.

python benchmarks/adam.py [--numel 10000000 100000000 200000000] [--threads 1 2] [--rounds 7] [--slow-rounds 1]
    [--average 64000000]

All implementations alternate in one process on the same tensors: bf16 parameters and gradients, fp32 masters and
moments. Each ratio is the median over rounds of two adjacent times. DeepSpeed's CPU Adam is included if installed.
`--average` measures an update of so many elements with a moving average of the parameters, and with split masters,
instead.
"""

import argparse
import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from fresh_processes import growth
from report import filled, options, publish
from steps import alternating, in_threads, ratio_of, seconds_of

from patrickstar._dry_run.machine_profile import benchmark_span
from patrickstar._kernels.averaged import AveragedRule
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.update_rule import Gradient

BYTES_PER_PARAM, AVERAGE_BYTES, SPLIT_BYTES = 28, 8, 26
"""Bytes per parameter that an AdamW update moves, that a moving average adds, and of an update of split masters."""
MEMMOVE = ctypes.CDLL(None).memmove
MEMMOVE.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def memmove(target: torch.Tensor, source: torch.Tensor, threads: int) -> None:
    """Copy with the C library, whose large copies bypass the caches, in a number of threads."""
    share = source.nbytes // threads
    starts = [(target.data_ptr() + n * share, source.data_ptr() + n * share) for n in range(threads)]
    in_threads(partial(MEMMOVE, *start, share) for start in starts)


def implementations(numel: int, threads: int) -> dict[str, Callable[[], object]]:
    """Return all implementations of one update, and what they are compared with, on the same tensors."""
    kernel = CppBackend.find(threads=threads)
    assert kernel is not None, "this installation has no C++ kernel; see `patrickstar doctor`"
    span = benchmark_span(numel)
    span.param.fill_(0.01)
    span.states[1].fill_(1e-4)
    master, grad, rule = torch.nn.Parameter(span.master.normal_()), torch.zeros(numel), span.rule
    out = tuple(torch.zeros(numel) for _ in (span.master, *span.states))
    elsewhere = replace(span, param=torch.zeros_like(span.param), out=out)
    settings = {"betas": (rule.beta1, rule.beta2), "eps": rule.eps, "weight_decay": rule.weight_decay}

    def cast(optimizer: torch.optim.Optimizer) -> None:
        """Do the same update by an fp32 optimizer, with an upcast gradient and a downcast parameter."""
        master.grad = grad.copy_(span.param)
        optimizer.step()
        with torch.no_grad():
            span.param.copy_(master)

    def torch_adamw(**kind: bool) -> Callable[[], None]:
        optimizer = torch.optim.AdamW([master], rule.lr, **settings, **kind)
        moments = dict(zip(("exp_avg", "exp_avg_sq"), span.states, strict=True))
        optimizer.state[master].update(moments, step=torch.tensor(1.0))
        return partial(cast, optimizer)

    found = {
        "ours": partial(kernel.update, [span], ()),
        "out_of_place": partial(kernel.update, [elsewhere], ()),
        "copy": partial(grad.copy_, span.states[0]),
        "memmove": partial(memmove, grad, span.states[0], threads),
        "read": partial(kernel.read, span.states[0][: numel // 2 * 2].view(torch.int64)),
        "grad_stats": partial(kernel.grad_stats, [span.grad], ()),
        "fused": torch_adamw(fused=True),
        "plain": torch_adamw(foreach=False, fused=False),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiled at its first use
    except ImportError:
        return found
    return found | {"deepspeed": partial(cast, DeepSpeedCPUAdam([master], rule.lr, **settings, adamw_mode=True))}


def measure(numel: int, threads: int, given: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Return a row of the table of updates, and one of the table of gradient statistics."""
    torch.set_num_threads(threads)
    sides = implementations(numel, threads)
    for action in sides.values():
        action()
    plain, ours = sides.pop("plain"), sides["ours"]
    _, added = growth(ours)
    times = alternating(sides, given.rounds, warm_up=0)
    slow = [seconds_of(plain) / seconds_of(ours) for _ in range(given.slow_rounds)]

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
    """Publish an update with and without a moving average of the parameters (ps.EMA), and of split masters."""
    plain, kernels = benchmark_span(numel), Kernels.best(torch.device("cpu"))
    rule, states = AveragedRule(plain.rule, 0.001), (*plain.states, torch.zeros(numel))
    plain.param.fill_(0.01)
    param, lower = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.int16)
    own_states = tuple(torch.zeros(numel) for _ in plain.states)
    split = replace(plain, param=param, upper=param, master=lower, states=own_states)
    spans = {
        "AdamW": plain,
        "AdamW and average": replace(plain, rule=rule, states=states),
        "AdamW, split masters": replace(split, grad=Gradient(torch.full_like(param, 0.01))),
    }
    moved = dict(zip(spans, (BYTES_PER_PARAM, BYTES_PER_PARAM + AVERAGE_BYTES, SPLIT_BYTES), strict=True))
    times = alternating({name: lambda span=span: kernels.update([span], ()) for name, span in spans.items()}, rounds)
    publish(
        "average",
        f"AdamW update of {numel:,} parameters with and without a moving average, and of split masters, "
        f"{torch.get_num_threads()} threads, median of {rounds} rounds. The limit is the ratio of the bytes moved.",
        [
            {
                "update": name,
                "seconds": f"{median(times[name]):.4f}",
                "GB/s": f"{nbytes * numel / median(times[name]) / 1e9:.1f}",
                "ratio": f"{ratio_of(times[name], times['AdamW']):.3f}",
                "limit": f"{nbytes / BYTES_PER_PARAM:.3f}",
            }
            for name, nbytes in moved.items()
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
        filled("adam", kernel=kernel.name if kernel else "", nbytes=BYTES_PER_PARAM),
        [update for update, _ in rows],
    )
    publish("grad_stats", filled("grad_stats"), [grad_stats for _, grad_stats in rows])


if __name__ == "__main__":
    main()
