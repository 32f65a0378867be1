"""Measured costs of single operations on the host of a dry run. See [Note: time of the host]."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch.nn import functional

from patrickstar._dry_run.host_time import HostClock, HostCosts
from patrickstar._dry_run.op_benchmark import OpBenchmark
from patrickstar._dry_run.op_tracer import OpTracer, TensorMeter, trace_operators
from patrickstar._hardware.cpu_allocator import cpu_allocator
from patrickstar._hardware.memory_meter import Meter

ROUNDS = 9
"""Number of measurements, of which the median is the result."""
CALLS = 200
"""Calls per measurement of what takes less than a microsecond."""
FILLED_BYTES = 1 << 24
"""Bytes of a block that is filled."""
LAYERS = 40
"""Layers of the model whose steps are timed: some tens of milliseconds, since tracing takes longer than operators."""


def measure_host(costs: OpBenchmark) -> HostCosts:
    """Measure the costs of the host for a dry run with these operator costs; takes some tenths of a second."""
    memory = torch.zeros(8, device="cpu")
    with torch.no_grad():
        view_s = _seconds(partial(memory.view, 8))
    fresh_s = _fresh_s(costs.meter) if costs.timer is None else 0.0
    return HostCosts(_dispatch_s(costs, view_s), view_s, _seconds(partial(costs.meter.now, 0)), fresh_s)


def _fresh_s(meter: Meter) -> float:
    """Return the seconds that filling a byte takes longer in a new block than in one that the allocator has kept."""
    fill, seconds = partial(torch.full, (FILLED_BYTES,), 1, dtype=torch.uint8, device="cpu"), []
    try:
        for limit_bytes in (0, 1 << 62):
            meter.limit(limit_bytes)
            seconds.append(_seconds(fill, 1))
    finally:
        meter.close()
    return max(0.0, seconds[0] - seconds[1]) / FILLED_BYTES


def _dispatch_s(costs: OpBenchmark, view_s: float) -> float:
    """Return the mean time that tracing adds to an operator outside of the tracer, in steps of a small model."""
    clock = HostClock(HostCosts(0.0, view_s, 0.0))
    # Beside an accelerator the host only launches operators, and the tracer counts that.
    computes = costs.timer is None
    meter = TensorMeter(allocator=cpu_allocator())
    tracer = OpTracer(meter, costs, lambda cost: clock.add(cost.seconds if computes else 0.0), clock)
    traced, real = _step(torch.device("meta")), _step(costs.device)
    added_s = []
    for _ in range(ROUNDS + 1):  # the first one measures the operators
        with trace_operators(tracer, costs.device.type):
            clock.start()
            traced()
            clock.end()
        start_s = time.process_time()
        real()
        real_s = time.process_time() - start_s
        added_s.append((clock.take() - real_s) / clock.operators)
    return max(0.0, median(added_s[1:]))


def _step(device: torch.device) -> Callable[[], None]:
    """Return a forward and backward of a small model."""
    weight, bias, hidden = (torch.full(size, 0.5, device=device, requires_grad=True) for size in ((8, 8), (8,), (4, 8)))

    def step() -> None:
        out = hidden
        for _ in range(LAYERS):
            normalized = functional.layer_norm(out, (8,), bias, bias)
            out = functional.gelu(functional.linear(normalized, weight, bias)).view(32).add(1.0).view(4, 8)
        out.sum().backward()

    return step


def _seconds(action: Callable[[], object], calls: int = CALLS) -> float:
    times = []
    for _ in range(ROUNDS):
        start_s = time.thread_time()
        for _ in range(calls):
            action()
        times.append((time.thread_time() - start_s) / calls)
    return median(times)
