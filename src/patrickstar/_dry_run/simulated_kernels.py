"""Simulated costs of a dry run: kernels of the update by their memory traffic, operators by a roofline."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from patrickstar._dry_run.op_tracer import OpCost, OpCosts, matrix_size, operations, touched_bytes
from patrickstar._dry_run.packed_products import unpacked_bytes
from patrickstar._dry_run.simulated_channels import SimulatedTransfer, SimulatedUpdate
from patrickstar._dry_run.simulated_hardware import SimulatedHardware
from patrickstar._hardware.transfer import Transfer
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.grad_norm import GradStats
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._perf_model.machine_spec import Machine


class SimulatedKernels(Kernels):
    """Kernels that compute nothing and take the time of their memory traffic."""

    def __init__(self, hardware: SimulatedHardware) -> None:
        super().__init__(None)
        self.hardware = hardware

    def has_kernel(self, device: torch.device) -> bool:
        return True

    def start(self, spans: Sequence[Span], scales: Sequence[float]) -> list[Any]:
        return self.start_after((), spans, scales)

    def update(self, spans: Sequence[Span], scales: Sequence[float]) -> None:
        for running in self.start(spans, scales):
            running.wait()

    def update_together(self, spans: Sequence[Span], update: Callable[[], None]) -> None:
        self.update(spans, ())

    def start_after(self, copies: Sequence[Transfer], spans: Sequence[Span], scales: Sequence[float]) -> list[Any]:
        on_host = [span for span in spans if self.hardware.on_host(span.master)]
        on_device = [span for span in spans if not self.hardware.on_host(span.master)]
        self._run_on_device(sum(span_bytes(span) for span in on_device))
        if not on_host:
            return []
        nbytes = sum(span_bytes(span) for span in on_host)
        if not self.hardware.has_gpu:
            self.hardware.update.run(nbytes, "update")
            return []
        from_device = [span for span in on_host if not self.hardware.on_host(span.param)]
        read = [each for span in on_host for each in (span.grad.latest, span.upper) if each is not None]
        down = sum(each.nbytes for each in read if not self.hardware.on_host(each))
        up = sum(span.param.nbytes for span in from_device)
        last = copies[-1] if copies else None
        assert last is None or isinstance(last, SimulatedTransfer), "copies of this hardware are simulated"
        downloads = self.hardware.down.begin(down, "gradients of an update", after=last) if down else last
        update = self.hardware.update.begin(nbytes, "update", after=downloads)
        uploads = self.hardware.up.begin(up, "parameters of an update", after=update) if up else None
        own = (downloads if down else None, update, uploads)
        return [SimulatedUpdate([each for each in own if each is not None])]

    def grad_stats(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> GradStats:
        on_host = [grad for grad in gradients if self.hardware.on_host(grad.latest)]
        on_device = [grad for grad in gradients if not self.hardware.on_host(grad.latest)]
        self._run_on_device(sum(gradient_bytes(grad) for grad in on_device))
        self.hardware.update.run(sum(gradient_bytes(grad) for grad in on_host), "gradient statistics")
        self.hardware.clock.wait_for_device()  # for the values
        return GradStats(tuple(0.0 for _ in gradients))  # no limit is exceeded, unless it is 0, too

    def _run_on_device(self, nbytes: int) -> None:
        gpu = self.hardware.machine.gpu
        if gpu is None:
            self.hardware.update.run(nbytes, "update")
        else:
            self.hardware.compute(nbytes / gpu.memory_bandwidth)


def gradient_bytes(grad: Gradient) -> int:
    """Return the bytes of a gradient."""
    parts = [grad.latest] if grad.accumulated is None else [grad.latest, grad.accumulated]
    return sum(part.nbytes for part in parts)


def span_bytes(span: Span) -> int:
    """Memory traffic of an update: read gradient, write parameter, read and write states (ZeRO-Offload §5).

    A parameter with a split master is read, too.
    """
    state_bytes = sum(tensor.nbytes for tensor in (span.master, *span.states))
    read = gradient_bytes(span.grad) + (0 if span.upper is None else span.upper.nbytes)
    return read + span.param.nbytes + 2 * state_bytes


# [Note: thin products]
# Rates of products by their smallest side are those of square ones, which fill few of a GPU's units if they are small.
# A product of a long matrix and a thin one, as of adapters, fills them: its time is that of its traffic, as long as the
# traffic takes longer than the operations at the full rate.


def limited_by_traffic(machine: Machine, count: int, nbytes: int) -> bool:
    """Return whether an operator with so many operations and bytes takes the time of its memory traffic."""
    return count / machine.matmul_rate() <= nbytes / _bandwidth(machine)


def roofline(machine: Machine) -> OpCosts:
    """Return a cost model in which each operator is bound by its matrix products or by its memory traffic."""

    def cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCost:
        count, nbytes = operations(func, args, kwargs, out), touched_bytes(args, kwargs, out)
        traffic_s = nbytes / _bandwidth(machine)
        if limited_by_traffic(machine, count, nbytes):
            return OpCost(traffic_s)
        compute_s = count / machine.matmul_rate(matrix_size(func, args))
        return OpCost(max(compute_s, traffic_s) + unpacked_bytes(func, args) / _bandwidth(machine))

    return cost


def _bandwidth(machine: Machine) -> float:
    return (machine.gpu or machine.host).memory_bandwidth
