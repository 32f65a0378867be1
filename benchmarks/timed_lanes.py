"""Compare dry runs on machine specs with runs of the engine on a simulated accelerator whose work takes time.

python benchmarks/timed_lanes.py [--cases NAME ...] [--steps 5]
The accelerator is the strict device of the tests in timed mode: streams run beside each other and beside the host, and
sleep as long as the machine spec says. Costs of operators, rates of links and traffic of updates are those of the dry
run; threads, streams, events and waits are the engine's own. So the ratio shows whether the engine achieves the overlap
that its dry run predicts. Model and machine are small, so that real work takes little of the simulated time.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from dry_runs import host_update_s
from report import options, publish, shown
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import strict_device

import patrickstar as ps
from patrickstar import Engine
from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulated_kernels import gradient_bytes, roofline, span_bytes
from patrickstar._dry_run.simulation import simulate
from patrickstar._hardware.transfer import Transfer
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.grad_norm import GradStats
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.machine_spec import Gpu, Host, Links, Machine
from patrickstar._step import streamed_update

WIDTH, LAYERS, ROWS = 192, 10, 64
CHUNK = "160KiB"
PIECE_NUMEL = 1 << 14
"""Elements per copy of an update, as small beside a chunk as `streamed_update.PIECE_NUMEL` is beside a large one."""
WARM_UP_STEPS = 4
LIMIT = 0.1


class Block(nn.Module):
    """Residual block of a transformer, without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


def build() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


PARAM_NUMEL = sum(param.numel() for param in build().parameters())
OPERATIONS = 6 * ROWS * PARAM_NUMEL  # of a step


@dataclass(frozen=True)
class Case:
    """Model data that fits, and the seconds of one step's work on each resource if nothing else runs."""

    name: str
    param16_share: float
    """Share of the parameters that fits on the device beside all non-model data."""
    compute_s: float
    update_s: float
    link_s: float
    """All parameters, copied once in one direction."""

    @property
    def machine(self) -> Machine:
        return Machine(
            name=self.name,
            source="a step's work takes the seconds of the case",
            gpu=Gpu(
                count=1,
                memory="1GiB",
                matmul_tflops=OPERATIONS / self.compute_s / 1e12,
                memory_bandwidth=2 * 28 * PARAM_NUMEL / self.compute_s,
            ),
            host=Host(memory="1GiB", memory_bandwidth=28 * PARAM_NUMEL / self.update_s, cores=1),
            links=Links(h2d=2 * PARAM_NUMEL / self.link_s, d2h=2 * PARAM_NUMEL / self.link_s),
        )


CASES = (
    Case("everything fits", 9.0, 2.0, 2.0, 0.5),
    Case("param16 fits, balanced", 1.15, 2.0, 1.8, 0.6),
    Case("param16 fits, update-bound", 1.15, 1.2, 3.0, 0.4),
    Case("half of param16 fits, transfer-bound", 0.5, 1.0, 0.8, 1.4),
    Case("half of param16 fits, compute-bound", 0.5, 3.0, 0.8, 0.5),
    Case("half of param16 fits, balanced", 0.5, 2.0, 1.8, 1.0),
)


class Channel:
    """One channel at a fixed rate, in bytes per second, which one thread uses at a time."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.busy_s = 0.0
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def run(self, action: Callable[[], Any], nbytes: int) -> Any:
        """Run an action, and sleep until the channel has moved its bytes, after all others that asked before."""
        seconds = nbytes / self.rate
        with self._lock:
            self._free_at_s = end_s = max(self._free_at_s, time.perf_counter()) + seconds
            self.busy_s += seconds
        result = action()
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return result


class TimedKernels(Kernels):
    """Kernels that take the time of their memory traffic, on the host and on the device."""

    def __init__(self, best: Kernels, machine: Machine, operators: strict_device.OperatorTimes) -> None:
        super().__init__(best.cpp)
        assert machine.gpu is not None
        self.host = Channel(machine.host.update_bandwidth(1, machine.host.cores))
        self._bandwidth = machine.gpu.memory_bandwidth
        self._operators = operators

    def start(self, spans: Sequence[Span], scales: Sequence[float]) -> list[Transfer]:
        on_host = [span for span in spans if span.master.device.type == "cpu"]
        on_device = [span for span in spans if span.master.device.type != "cpu"]
        if on_device:
            with self._operators.as_one(sum(map(span_bytes, on_device)) / self._bandwidth):
                super().start(on_device, scales)

        def update() -> None:
            for running in super(TimedKernels, self).start(on_host, scales):
                running.wait()

        if on_host:
            self.host.run(update, sum(map(span_bytes, on_host)))
        return []

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        self.start(spans, scales)

    def grad_stats(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> GradStats:
        on_host = [grad for grad in gradients if grad.latest.device.type == "cpu"]
        on_device = [grad for grad in gradients if grad.latest.device.type != "cpu"]
        squares = [0.0] * len(on_device)
        if on_device:
            # As a compiled kernel: no host wait between gradients. No norm is reached, so any order of the sum will do.
            with self._operators.as_one(sum(map(gradient_bytes, on_device)) / self._bandwidth):
                norms = torch._foreach_norm([grad.latest for grad in on_device])
                squares = [norm**2 for norm in torch.stack(norms).tolist()]
        if on_host:
            parent, nbytes = super(), sum(map(gradient_bytes, on_host))
            squares += self.host.run(lambda: parent.grad_stats(on_host, scales), nbytes).squares
        return GradStats(tuple(squares))


def passed_s(event: torch.Event) -> float:
    """Wait for an event of the device; return the time at which it has passed."""
    event.synchronize()
    return time.perf_counter()


def step_of(batch: torch.Tensor, clipped: bool) -> Callable[[Any], None]:
    def step(engine: Any) -> None:
        engine.backward(engine(batch).float().square().mean(), update=not clipped)
        if clipped:
            engine.clip_grad_norm_(1e9)  # nothing is clipped
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    return step


def configured(device: str, device_memory: int | str) -> ps.Config:
    return ps.Config(device=device, device_memory=device_memory, host_memory="128MiB", chunk_size=CHUNK)


def predict(case: Case, clipped: bool) -> DryRunReport:
    """Dry-run a case; its report holds the device budget."""
    step = step_of(torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="meta"), clipped)
    ample = simulate(Engine, build, configured("cpu", "512MiB"), step, case.machine)
    budget = int(ample.stats.device_peak_non_model_bytes + 2 * PARAM_NUMEL * case.param16_share)
    return simulate(Engine, build, configured("cpu", budget), step, case.machine)


def measure(case: Case, clipped: bool, budget: int, steps: int) -> tuple[float, float, float, ps.StepStats]:
    """Train on the timed device; return the median seconds of a step, of compute and of updates, and statistics."""
    machine, costs = case.machine, roofline(case.machine)
    assert machine.links is not None
    strict_device.configure(timed=strict_device.Rates(machine.links.h2d, machine.links.d2h))
    torch.manual_seed(0)
    batch = torch.randn(ROWS, WIDTH).bfloat16().to("strict")

    operators = strict_device.OperatorTimes(lambda *call: costs(*call).seconds, strict_device.extension.charge)
    kernels = TimedKernels(Kernels.best(torch.device("cpu")), machine, operators)
    step, measured, ends = step_of(batch, clipped), [], []
    with (
        Engine(build, configured("strict", budget), kernels=kernels) as engine,
        operators,
        ThreadPoolExecutor(1) as waiter,
    ):
        for _ in range(WARM_UP_STEPS + steps):
            before = operators.charged_s, kernels.host.busy_s
            step(engine)
            event = torch.Event(device=torch.device("strict"))
            event.record()
            ends.append(waiter.submit(passed_s, event))  # the training thread does not wait
            after = operators.charged_s, kernels.host.busy_s
            measured.append([end - start for start, end in zip(before, after, strict=True)])
        seconds = [end_s - start_s for start_s, end_s in pairwise(each.result() for each in ends)]
        stats = engine.stats.last
    strict_device.configure()
    compute_s, update_s = (median(values) for values in zip(*measured[WARM_UP_STEPS:], strict=True))
    return median(seconds[-steps:]), compute_s, update_s, stats


def row(case: Case, clipped: bool, steps: int) -> dict[str, str]:
    predicted = predict(case, clipped)
    seconds, compute_s, update_s, stats = measure(case, clipped, predicted.device_budget_bytes, steps)
    ratio, both = seconds / predicted.seconds, (predicted.stats, stats)
    return {
        "case": case.name,
        "step": "clipped" if clipped else "update=True",
        "compute": f"{predicted.compute_s:.2f} / {compute_s:.2f} s",
        "update on the host": f"{host_update_s(predicted):.2f} / {update_s:.2f} s",
        "to the device": " / ".join(format_size(stats.h2d_bytes) for stats in both),
        "to the host": " / ".join(format_size(stats.d2h_bytes) for stats in both),
        "updates in backward": " / ".join(f"{stats.speculation_hits}" for stats in both) + f" of {stats.speculated}",
        "bound": f"{predicted.bound_s:.2f} s",
        "dry run": f"{predicted.seconds:.2f} s",
        "measured": f"{seconds:.2f} s",
        "measured / dry run": f"{ratio:.2f}{'' if abs(ratio - 1) <= LIMIT else ' (!)'}",
    }


def main() -> None:
    given = options(__doc__, cases=[case.name for case in CASES], steps=5)
    streamed_update.PIECE_NUMEL = PIECE_NUMEL
    cases = [case for case in CASES if case.name in given.cases]
    rows = shown(row(case, clipped, given.steps) for case, clipped in product(cases, (True, False)))
    if len(rows) < 2 * len(CASES):
        return
    publish(
        "timed_lanes",
        f"Dry run / run of the engine on a simulated accelerator whose work takes the time of the machine spec: "
        f"{LAYERS} blocks of width {WIDTH}, {PARAM_NUMEL:,} parameters, {ROWS} rows, chunks of {CHUNK}. Seconds of a "
        f"step: medians after {WARM_UP_STEPS} steps; limit {LIMIT:.0%}, others are marked. Gradients are clipped at a "
        f"norm that they do not reach, or updated with update=True.",
        rows,
        device="strict",
    )


if __name__ == "__main__":
    main()
