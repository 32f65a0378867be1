"""Dry run: the real engine trains a meta-device model on simulated hardware.

Decisions, transfers and memory use equal those of a real run to the byte, because the same code makes them. Times
follow from the rates of a machine spec.
"""

import copy
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from patrickstar._autograd.recomputed_layers import layers_of
from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._dry_run.cluster import Cluster, slowed_down
from patrickstar._dry_run.host_time import HostClock, HostCosts
from patrickstar._dry_run.lanes import name_parameters
from patrickstar._dry_run.measured_machine import MeasuredMachine
from patrickstar._dry_run.module_trace import ModuleTrace
from patrickstar._dry_run.op_tracer import (
    DEVICE_GRAIN_BYTES,
    OpCost,
    OpCosts,
    OpTracer,
    TensorMeter,
    trace_operators,
)
from patrickstar._dry_run.report import ChannelUse, DryRunReport, MemorySample
from patrickstar._dry_run.simulated_hardware import META, SimulatedHardware
from patrickstar._dry_run.simulated_kernels import SimulatedKernels, roofline
from patrickstar._dry_run.simulated_processes import SimulatedWorld
from patrickstar._hardware.cpu_allocator import cpu_allocator
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._schedule.trace import Trace
from patrickstar._step.stats import StepStats
from patrickstar._tiers.hardware import Hardware
from patrickstar.config import Config, LockFree
from patrickstar.errors import ModelError

MIN_STEPS, MAX_STEPS = 3, 8
"""At least a warm-up step, a planned step and one that starts from the end state of a planned step; then until a step
transfers the same bytes as the previous one, and leaves no more work to the next one."""

QUANT_STATE = "quant_state"
"""Attribute of a parameter of 4 bits (bitsandbytes): the constants of its blocks."""

Step = Callable[[Any], None]
"""One step of a training loop: forward, backward, update. Its argument is the engine."""

EngineFactory = Callable[..., Any]
"""`Engine` or a function that makes one. Passed in, because the package of `Engine` imports this one."""


def forward_backward_step(
    loss_of: Callable[[Any], torch.Tensor] | None, args: Any, kwargs: Any, clips: Sequence[float] = (), passes: int = 1
) -> Step:
    """Return a training step on meta copies of the inputs: forward, backward (of `out.loss` or `out`), update.

    `clips` are the factors of a real step's clipping, if gradients are clipped: those of 1 changed nothing. Gradients
    of `passes` forwards and backwards are accumulated.
    """
    norms = [math.inf if factor == 1.0 else 0.0 for factor in clips]
    loss_of = loss_of or (lambda out: getattr(out, "loss", out))
    args, kwargs = pytree.tree_map_only(torch.Tensor, _to_meta, (args, kwargs))

    def step(engine: Any) -> None:
        for left in reversed(range(passes)):
            engine.backward(loss_of(engine(*args, **kwargs)), accumulate=left > 0)
        for norm in norms:
            engine.clip_grad_norm_(norm)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    return step


def _to_meta(value: torch.Tensor) -> torch.Tensor:
    """Convert floating-point tensors to meta; integers keep their values. See [Note: values of integers]."""
    return value.detach().to(META) if value.dtype.is_floating_point else value


def simulate_on_this_machine(
    make_engine: EngineFactory,
    model: nn.Module | Callable[[], nn.Module],
    config: Config,
    step: Step,
    device: torch.device,
    measured: MeasuredMachine | None = None,
    processes: int = 1,
    replicas: int = 1,
) -> DryRunReport:
    """Run `simulate` for this machine with measured operator costs; takes a few seconds.

    `measured`: what earlier dry runs have measured; by default the machine is measured first. Operators are measured
    with the threads that each of several processes uses. The random state and the number of threads are restored.
    """
    with kept_global_state(device):
        if measured is None:
            measured = MeasuredMachine.of(device, config.disk.directory if config.disk is not None else None)
        cluster = Cluster(measured.machine, processes, replicas)
        if device.type == "cpu" and processes > 1:
            torch.set_num_threads(min(torch.get_num_threads(), cluster.threads))
        hardware = Hardware(device)
        budget_bytes = int(config.device_memory or hardware.device_bytes(processes > 1))
        outside_bytes = hardware.outside_plan_bytes(config.compute_dtype, config.optimizer.may_multiply, budget_bytes)
        costs = measured.operators
        own_costs = slowed_down(costs, cluster.slowdown) if device.type == "cpu" else costs
        run = partial(
            simulate,
            make_engine,
            model,
            config,
            step,
            measured.machine,
            own_costs,
            processes=processes,
            replicas=replicas,
        )
        # Measure all operators first: the second run then times Python, autograd and the engine alone.
        run(steps=1)
        report = run(host=measured.host, library_bytes=outside_bytes)
        return replace(report, estimated=tuple(sorted(costs.estimated)))


def dry_run_engine(
    engine: Any, step: Step, options: Mapping[str, Any] | None = None, measured: MeasuredMachine | None = None
) -> DryRunReport:
    """Run a dry run of `step` with an existing engine's model, budgets and processes on this machine.

    Args:
        engine: Engine.
        step: Step of its training.
        options: Options of the configuration that differ from the engine's.
        measured: See `simulate_on_this_machine`.
    """
    host_bytes = engine.host_budget_bytes * len(engine.world.local_ranks)
    budgets = {"device_memory": engine.device_budget_bytes, "host_memory": host_bytes}
    model, mesh = engine.module, engine._core.distribution.mesh
    return simulate_on_this_machine(
        type(engine),
        lambda: copy_to_meta(model),
        engine.config.model_copy(update={**budgets, **(options or {})}),
        step,
        engine.device,
        measured,
        engine.world.size,
        mesh.replicas,
    )


def on_meta(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return the model, built on the meta device if it is a function."""
    if isinstance(model, nn.Module):
        return model
    with META, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again when the model is built
        return model()


def meta_model(model: nn.Module | Callable[[], nn.Module]) -> tuple[nn.Module, Callable[[str], torch.Tensor]]:
    """Return a model on the meta device, and values of its parameters by name for an engine on simulated hardware."""
    model = on_meta(model)
    for name, param in model.named_parameters():
        if not param.is_meta:
            raise ModelError(f"parameter {name!r} was not created on the meta device: the function has to build it")
    values = {name: torch.empty_like(param, device=META) for name, param in model.named_parameters()}
    return model, values.__getitem__


@contextmanager
def kept_global_state(device: torch.device) -> Iterator[None]:
    """Restore the random states of PyTorch, Python and NumPy, the default dtype and the number of threads."""
    python, numpy, dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(
            devices=[] if device.type == "cpu" else [device],
            device_type="cuda" if device.type == "cpu" else device.type,
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)


def copy_to_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module with parameters and buffers on the meta device."""
    memo: dict[int, Any] = {}
    for param in module.parameters():
        with torch._C.DisableTorchFunctionSubclass():
            copied = nn.Parameter(torch.empty_like(param, device=META), requires_grad=param.requires_grad)
        # The layer of a parameter of 4 bits looks for its constants there; they are shared, since they are only read.
        if (constants := vars(param).get(QUANT_STATE)) is not None:
            setattr(copied, QUANT_STATE, constants)
            memo[id(constants)] = constants
        memo[id(param)] = copied
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=META)
    return copy.deepcopy(module, memo)


def constants_bytes(model: nn.Module) -> int:
    """Return the bytes of the constants of parameters of 4 bits, which stay on the device, outside of chunks."""
    states = (vars(param).get(QUANT_STATE) for param in model.parameters())
    shared = {id(tensor): tensor for state in states if state is not None for tensor in _tensors(state)}
    return sum(tensor.nbytes for tensor in shared.values())


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an object and of those in its attributes: constants are quantized, too, if asked for."""
    for value in vars(state).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif hasattr(value, "absmax"):
            yield from _tensors(value)


def _disk_bytes(engine: Any, cluster: Cluster) -> int:
    """Return the bytes of the disk that the process may use."""
    disk_tier, drive = engine._core.manager.disk_tier, cluster.machine.disk
    if disk_tier is None:
        return 0
    return disk_tier.file.capacity_bytes or (drive.capacity // cluster.per_machine if drive is not None else 0)


def _enough_steps(history: list[StepStats], left: list[float], steps: int | None) -> bool:
    """Return whether `steps` steps have run or, by default, whether steps repeat.

    `left` are the seconds of work that each step has left to channels: while they grow, steps are too short.
    """
    if steps is not None or len(history) >= MAX_STEPS:
        return len(history) == (steps or MAX_STEPS)
    if len(history) < MIN_STEPS or _transfers(history[-1]) != _transfers(history[-2]):
        return False
    return left[-1] <= left[-2] or math.isclose(left[-1], left[-2], rel_tol=1e-6)


def _transfers(stats: StepStats) -> tuple[int, ...]:
    """Return what repeats from step to step once a plan has settled."""
    transferred = stats.h2d_bytes, stats.d2h_bytes, stats.disk_read_bytes, stats.disk_write_bytes
    return *transferred, stats.gathered_bytes, stats.reduced_bytes, stats.speculated, stats.speculation_hits


def _first_parameters(engine: Any) -> dict[int, str]:
    return {index: managed_params[0].name for index, managed_params in engine._core.shards.by_chunk.items()}


def _least_device_bytes(manager: ChunkManager, trace: Trace) -> int:
    return max(
        moment.non_model_bytes + sum(manager.param16[index].nbytes for index in moment.chunks)
        for moment in trace.moments
    )


def _memory_sample(manager: ChunkManager, non_model_bytes: int, at_s: float) -> MemorySample:
    host, disk = manager.host_tier, manager.disk_tier
    return MemorySample(
        at_s,
        manager.device_tier.used,
        non_model_bytes,
        host.used + host.other_bytes + host.spare_bytes,
        disk.file.used_bytes if disk is not None else 0,
    )


def simulate(
    make_engine: EngineFactory,
    model: nn.Module | Callable[[], nn.Module],
    config: Config,
    step: Step,
    machine: Machine,
    costs: OpCosts | None = None,
    *,
    steps: int | None = None,
    host: HostCosts | None = None,
    library_bytes: int = 0,
    processes: int = 1,
    replicas: int = 1,
    **hooks: Any,
) -> DryRunReport:
    """Train a meta-device model for a few steps and report the last one.

    Args:
        model: On the meta device, or a function that builds it and is called under the meta device.
        step: Must not read values of floating-point tensors.
        costs: Cost model of operators; by default a roofline of the machine.
        steps: Number of steps; by default until their transfers and early updates repeat.
        host: If given, the real time of Python, autograd and the engine counts too. See [Note: time of the host].
        library_bytes: Device memory that libraries occupy from the start, and that is left to fragmentation.
        processes: Number of data-parallel processes, of which the first one is reported: one per GPU of as many
            machines as they need, or all on one machine without GPUs. See [Note: simulated processes].
        replicas: Number of replicas that the processes form.
        hooks: Keyword arguments of the engine.

    Raises:
        BudgetError: The model does not fit, as in a real run.
        ConfigError: The processes can't be divided so.
    """
    cluster = Cluster(machine, processes, replicas)
    machine = machine.share(cluster.per_machine)
    if config.precision == "auto":
        config = config.with_precision(machine.precision)
    if (late := config.late_update) is not None:  # the steps that are simulated are those that are delayed
        files = dict(log=None, replay=None) if isinstance(late, LockFree) else {}
        config = config.model_copy(update={"update": late.model_copy(update={"after": 1} | files)})
    model, weights = meta_model(model)
    if config.activation_checkpointing == "auto":  # what takes the least memory, as long as nothing is chosen
        least = 1.0 if layers_of(model) else None
        config = config.model_copy(update={"activation_checkpointing": least})
    if machine.gpu is not None:  # on a CPU they are in the process's memory before the engine is there
        library_bytes += constants_bytes(model)
    meter = TensorMeter(DEVICE_GRAIN_BYTES) if machine.gpu is not None else TensorMeter(allocator=cpu_allocator())
    hardware = SimulatedHardware(machine, meter, library_bytes)
    if processes > 1:
        hooks |= {"world": SimulatedWorld(hardware, cluster), "mesh": cluster.mesh}
    engine: Any = None
    modules: ModuleTrace
    timeline: list[MemorySample] = []

    clock = None if host is None else HostClock(host)

    def advance(cost: OpCost) -> None:
        if clock is not None:
            hardware.launch(clock.take())
        hardware.compute(cost.seconds)
        if engine is not None:
            non_model_bytes = meter.now(0) + tracer.scratch_bytes
            modules.note_operator(non_model_bytes)
            timeline.append(_memory_sample(engine._core.manager, non_model_bytes, hardware.clock.now))

    wait = hardware.clock.wait_for_device
    tracer = OpTracer(meter, costs if costs is not None else roofline(machine), advance, clock, wait)
    meter.add_persistent(library_bytes)  # part of the baseline after calibration, hence added again below
    with trace_operators(tracer, "cpu" if machine.gpu is None else "cuda"):
        engine = make_engine(model, config, weights, kernels=SimulatedKernels(hardware), hardware=hardware, **hooks)
        meter.add_persistent(library_bytes)
        modules = ModuleTrace(engine.module)
        hardware.clock.phase = modules.phase
        try:
            history: list[StepStats] = []
            left: list[float] = []
            while not _enough_steps(history, left, steps):
                start_s = hardware.clock.now
                hardware.start_step()
                timeline.clear()
                with modules.watch():
                    if clock is not None:
                        clock.start()
                    step(engine)
                    if clock is not None:
                        clock.end()
                        clock.add(clock.costs.meter_s * len(engine._core.tracer.trace.moments))
                        hardware.launch(clock.take())
                        hardware.clock.wait_for_host()
                if not history:
                    page_lock_s, first_step_s = hardware.page_lock_s, hardware.page_lock_s + hardware.clock.now
                history.append(engine.stats.last)
                left.append(hardware.left_s)
            channels = tuple(ChannelUse(each.name, each.busy_s, each.nbytes) for each in hardware.channels)
            # The difference of two times is rounded, hence possibly smaller than the sum of what lies between them.
            seconds = max(hardware.clock.now - start_s, hardware.computed_s, hardware.launched_s)
            return DryRunReport(
                seconds,
                hardware.computed_s,
                channels,
                engine.stats.last,
                engine._core.tracer.trace,
                tuple(replace(sample, at_s=sample.at_s - start_s) for sample in timeline),
                engine.device_budget_bytes,
                engine.host_budget_bytes,
                _disk_bytes(engine, cluster),
                _least_device_bytes(engine._core.manager, engine._core.tracer.trace),
                modules.peak_module,
                lanes=hardware.lanes(start_s),
                waits=name_parameters(hardware.clock.waits, start_s, _first_parameters(engine)),
                processes=processes,
                replicas=replicas,
                host_s=hardware.launched_s,
                page_lock_s=page_lock_s,
                first_step_s=first_step_s,
            )
        finally:
            engine.close(keep=False)
