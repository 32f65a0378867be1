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

ROUNDS = 5
"""Number of measurements, of which the median is the result."""
CALLS = 200
"""Calls per measurement of what takes less than a microsecond."""
LAYERS = 40
"""Layers per measurement: some tens of milliseconds, since the tracer takes longer than their operators."""


def measure_host(costs: OpBenchmark) -> HostCosts:
    """Measure the costs of the host for a dry run with these operator costs; takes some tenths of a second."""
    memory = torch.zeros(8, device="cpu")
    with torch.no_grad():
        view_s = _seconds(partial(memory.view, 8))
    return HostCosts(_dispatch_s(costs), view_s, _seconds(partial(costs.meter.now, 0)))


def _dispatch_s(costs: OpBenchmark) -> float:
    """Return the mean time of an operator outside of the tracer, in a loop of the operators of a layer."""
    weight, bias, hidden = (torch.empty(shape, device="meta") for shape in ((8, 8), (8,), (4, 8)))
    clock = HostClock(HostCosts(0.0, 0.0, 0.0))
    tracer = OpTracer(TensorMeter(allocator=cpu_allocator()), costs, lambda cost: None, clock)

    def layer() -> None:
        normalized = functional.layer_norm(hidden, (8,), bias, bias)
        functional.gelu(functional.linear(normalized, weight, bias)).view(32).add(1.0)

    times = []
    with trace_operators(tracer, costs.device.type):
        layer()  # measures the operators
        for _ in range(ROUNDS):
            clock.start()
            for _ in range(LAYERS):
                layer()
            clock.end()
            times.append(clock.take() / clock.operators)
    return median(times)


def _seconds(action: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        start_s = time.thread_time()
        for _ in range(CALLS):
            action()
        times.append((time.thread_time() - start_s) / CALLS)
    return median(times)
