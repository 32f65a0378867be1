"""A rehearsal: the engine itself trains a model without bytes, on a machine that is only described.

What it decides, moves and holds is what a run would, to the byte, since it is the same code; what that takes is what
the machine's rates say.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from patrickstar._dry_run.machine_profile import profile_machine
from patrickstar._dry_run.op_benchmark import OpBenchmark
from patrickstar._dry_run.op_tracer import (
    DEVICE_GRAIN_BYTES,
    HOST_GRAIN_BYTES,
    OpCost,
    OpCosts,
    OpTracer,
    TensorMeter,
    matrix_size,
    operations,
    touched_bytes,
    watching,
)
from patrickstar._dry_run.report import ChannelUse, DryRunReport, MemorySample
from patrickstar._dry_run.simulated_channels import SimulatedTransfer
from patrickstar._dry_run.simulated_hardware import META, SimulatedHardware
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.grad_norm import GradStats
from patrickstar._kernels.update_rule import Gradient, Span
from patrickstar._memory.chunk_manager import ChunkManager
from patrickstar._memory.hardware import Hardware
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._step.stats import StepStats
from patrickstar.config import Config
from patrickstar.errors import ModelError, PatrickStarError

FEWEST_STEPS, MOST_STEPS = 3, 8
"""One that is traced, one that follows its trace, and one that begins where a planned one has ended; then until a step
moves what the one before it did."""

UNSEEN_BYTES = 3 << 19
"""What Python's objects, autograd's and other small ones add on a CPU to a step's peak, beside tensors and operators,
and what one run differs from another by. Chosen: of 200 random runs at all sorts of budgets, none that was said to fit
was refused with it, and one was with 1 MiB (`benchmarks/surprises.py`)."""

LOOKS = 100
"""At the meter, to know what one takes."""

Step = Callable[[Any], None]
"""One step of a training loop: forward, backward, update. Its argument is the engine."""

EngineFactory = Callable[..., Any]
"""`Engine`, or what makes one. The engine's own room imports this one, so it is passed in."""


class _SimulatedUpdate:
    def __init__(self, transfer: SimulatedTransfer) -> None:
        self.transfer = transfer

    def finish(self) -> None:
        self.transfer.wait()


class SimulatedKernels(Kernels):
    """Updates nothing, and takes as long as its bytes do in memory."""

    def __init__(self, hardware: SimulatedHardware) -> None:
        super().__init__(None)
        self.hardware = hardware

    def has_kernel(self, device: torch.device) -> bool:
        return True

    def start(self, spans: Sequence[Span], scales: Sequence[float]) -> list[Any]:
        below = [span for span in spans if self.hardware.on_host(span.master)]
        above = [span for span in spans if not self.hardware.on_host(span.master)]
        self._on_device(sum(_span_bytes(span) for span in above))
        nbytes = sum(_span_bytes(span) for span in below)
        if not self.hardware.has_gpu:
            self.hardware.update.run(nbytes, "update")
            return []
        return [_SimulatedUpdate(self.hardware.update.begin(nbytes, "update"))]

    def grad_stats(self, gradients: Sequence[Gradient], scales: Sequence[float]) -> GradStats:
        below = [grad for grad in gradients if self.hardware.on_host(grad.latest)]
        above = [grad for grad in gradients if not self.hardware.on_host(grad.latest)]
        self._on_device(sum(_gradient_bytes(grad) for grad in above))
        self.hardware.update.run(sum(_gradient_bytes(grad) for grad in below), "survey")
        return GradStats(tuple(1.0 for _ in gradients))

    def _on_device(self, nbytes: int) -> None:
        gpu = self.hardware.machine.gpu
        if gpu is None:
            self.hardware.update.run(nbytes, "update")
        else:
            self.hardware.compute(nbytes / gpu.memory_bandwidth)


def _gradient_bytes(grad: Gradient) -> int:
    parts = [grad.latest] if grad.accumulated is None else [grad.latest, grad.accumulated]
    return sum(part.nbytes for part in parts)


def _span_bytes(span: Span) -> int:
    """Gradient read, parameter written, master and states read and written (ZeRO-Offload §5: the update's traffic)."""
    kept = sum(tensor.nbytes for tensor in (span.master, *span.states))
    return _gradient_bytes(span.grad) + span.param.nbytes + 2 * kept


def roofline(machine: Machine) -> OpCosts:
    """What an operator takes where its matrix products, or its bytes, are all that counts."""
    bandwidth = (machine.gpu or machine.host).memory_bandwidth

    def cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OpCost:
        computing = operations(func, args, kwargs, out) / machine.matmul_rate(matrix_size(args))
        return OpCost(max(computing, touched_bytes(args, kwargs, out) / bandwidth))

    return cost


def forward_backward_step(loss_of: Callable[[Any], torch.Tensor], args: Any, kwargs: Any) -> Step:
    """A step as users write it, on inputs without bytes."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, _to_meta, (args, kwargs))

    def step(engine: Any) -> None:
        engine.backward(loss_of(engine(*args, **kwargs)))
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    return step


def _to_meta(value: torch.Tensor) -> torch.Tensor:
    """Whole numbers keep their values. See [Note: values of integers]."""
    return value.to(META) if value.dtype.is_floating_point else value


def simulate_on_this_machine(
    make_engine: EngineFactory,
    model: nn.Module | Callable[[], nn.Module],
    config: Config,
    step: Step,
    device: torch.device,
    machine: Machine | None = None,
) -> DryRunReport:
    """The same on this machine, whose operators are measured one by one: some seconds.

    machine: what `profile_machine` said of it; by default it is asked, which takes some more. Random numbers that
    come after
    are those that would have come without it.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if machine is None:
            machine = profile_machine(device, config.disk.directory if config.disk is not None else None)
        return _simulate_on_this_machine(make_engine, model, config, step, device, machine)


def _simulate_on_this_machine(
    make_engine: EngineFactory,
    model: nn.Module | Callable[[], nn.Module],
    config: Config,
    step: Step,
    device: torch.device,
    machine: Machine,
) -> DryRunReport:
    library_bytes = Hardware(device).library_bytes(config.compute_dtype)
    bandwidth = (machine.gpu or machine.host).memory_bandwidth
    costs = OpBenchmark(device, bandwidth, roofline(machine))
    simulate(
        make_engine, model, config, step, machine, costs, steps=1
    )  # after which all operators, and libraries, are known
    start = time.perf_counter()
    for _ in range(LOOKS):
        costs.meter.now(0)
    meter_s = (time.perf_counter() - start) / LOOKS
    unseen_bytes = UNSEEN_BYTES if device.type == "cpu" else 0
    found = simulate(
        make_engine,
        model,
        config,
        step,
        machine,
        costs,
        meter_s=meter_s,
        unseen_bytes=unseen_bytes,
        library_bytes=library_bytes,
    )
    return replace(found, estimated=tuple(sorted(costs.estimated)))


def dry_run_report(engine: Any, step: Step) -> DryRunReport:
    """What a step of this engine's model takes on this machine, whose rates are measured first."""
    budgets = {"device_memory": engine.device_budget_bytes, "host_memory": engine.host_budget_bytes}
    model = engine.module
    return simulate_on_this_machine(
        type(engine), lambda: copy_to_meta(model), engine.config.model_copy(update=budgets), step, engine.device
    )


def copy_to_meta(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers have no bytes."""
    memo: dict[int, Any] = {}
    for param in module.parameters():
        with torch._C.DisableTorchFunctionSubclass():
            memo[id(param)] = nn.Parameter(torch.empty_like(param, device=META), requires_grad=param.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=META)
    return copy.deepcopy(module, memo)


def _disk_bytes(engine: Any, machine: Machine) -> int:
    """What the disk has to give."""
    if engine._core.manager.disk_tier is None:
        return 0
    return engine._core.manager.disk_tier.file.capacity_bytes or (
        machine.disk.capacity if machine.disk is not None else 0
    )


def _settled(found: list[StepStats], steps: int | None) -> bool:
    """Whether enough steps were taken: so many, or as many as it takes until they repeat."""
    if steps is not None or len(found) >= MOST_STEPS:
        return len(found) == (steps or MOST_STEPS)
    return len(found) >= FEWEST_STEPS and _moved(found[-1]) == _moved(found[-2])


def _moved(stats: StepStats) -> tuple[int, ...]:
    return stats.h2d_bytes, stats.d2h_bytes, stats.disk_read_bytes, stats.disk_write_bytes


def _memory_sample(manager: ChunkManager, non_model_bytes: int, at_s: float) -> MemorySample:
    host, disk = manager.host_tier, manager.disk_tier
    return MemorySample(
        at_s,
        manager.device_tier.used,
        non_model_bytes,
        host.used + host.other_bytes,
        disk.file.used_bytes if disk is not None else 0,
    )


@contextmanager
def _name_failing_module(model: nn.Module) -> Iterator[None]:
    """Say which module can't run without bytes, and how to go on."""
    names = {module: name for name, module in model.named_modules()}
    inside: list[nn.Module] = []

    def enter(module: nn.Module, args: Any) -> None:
        inside.append(module)

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        inside.pop()

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
    try:
        yield
    except PatrickStarError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        where = "the step, outside of all modules,"
        if inside:
            where = f"module {names.get(inside[-1], '?')!r} ({type(inside[-1]).__name__})"
        raise ModelError(
            f"{where} can't be rehearsed on tensors without bytes: {error}. Train it without a rehearsal: the first "
            f"step traces what it does"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def simulate(
    make_engine: EngineFactory,
    model: nn.Module | Callable[[], nn.Module],
    config: Config,
    step: Step,
    machine: Machine,
    costs: OpCosts | None = None,
    *,
    steps: int | None = None,
    meter_s: float | None = None,
    unseen_bytes: int = 0,
    library_bytes: int = 0,
    **hooks: Any,
) -> DryRunReport:
    """Train a model for some steps without its bytes, and tell of the last of them.

    model: on the meta device, or a function that builds it, which is called under it. step: must read no value of a
    tensor. steps: how many; by default until they repeat. costs: what operators take; by default what the machine's
    rates say. meter_s: what a look at the meter takes on this machine; given, the time that Python, autograd and the
    engine took here counts too. unseen_bytes: non-model data that is neither a tensor nor an operator's.
    library_bytes: what the device's libraries keep of it from the start. hooks: the engine's.
    Raises BudgetError, as a run would, where the model does not fit.
    """
    meter = TensorMeter(DEVICE_GRAIN_BYTES) if machine.gpu is not None else TensorMeter(HOST_GRAIN_BYTES, True)
    hardware = SimulatedHardware(machine, meter, library_bytes)
    engine: Any = None
    timeline: list[MemorySample] = []

    def spend(taken: float) -> None:
        hardware.compute(taken)
        if engine is not None:
            timeline.append(
                _memory_sample(engine._core.manager, meter.now(0) + watch.scratch_bytes, hardware.clock.now)
            )

    watch = OpTracer(meter, costs if costs is not None else roofline(machine), spend)
    if not isinstance(model, nn.Module):
        with META:
            model = model()
    values = {name: torch.empty_like(param, device=META) for name, param in model.named_parameters()}
    meter.add_persistent(library_bytes)  # calibration forgets it, and it is counted anew below
    with watching(watch, "cpu" if machine.gpu is None else "cuda"):
        engine = make_engine(
            model, config, values.__getitem__, kernels=SimulatedKernels(hardware), hardware=hardware, **hooks
        )
        meter.add_persistent(unseen_bytes + library_bytes)
        try:
            found: list[StepStats] = []
            while not _settled(found, steps):
                began, hardware.computed_s, watch.inside_s = hardware.clock.now, 0.0, 0.0
                timeline.clear()
                started = time.perf_counter()
                before = [(lane.busy_s, lane.nbytes) for lane in hardware.channels]
                with _name_failing_module(engine.module):
                    step(engine)
                found.append(engine.stats.last)
            channels = tuple(
                ChannelUse(lane.name, lane.busy_s - busy_s, lane.nbytes - nbytes)
                for lane, (busy_s, nbytes) in zip(hardware.channels, before, strict=True)
            )
            managing = 0.0
            if meter_s is not None:
                managing = time.perf_counter() - started - watch.inside_s
                managing += meter_s * len(engine._core.tracer.trace.moments)
            return DryRunReport(
                hardware.clock.now - began + managing,
                hardware.computed_s + managing,
                channels,
                engine.stats.last,
                engine._core.tracer.trace,
                tuple(replace(one, at_s=one.at_s - began) for one in timeline),
                engine.device_budget_bytes,
                engine.host_budget_bytes,
                _disk_bytes(engine, machine),
            )
        finally:
            engine.close(keep=False)
