"""Plans from the names of a model and of a machine or its parts: `ps.plan`."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from patrickstar._layout.byte_size import format_size, parse_size
from patrickstar._layout.schema import COMPUTE_DTYPES
from patrickstar._perf_model.adapters import adapters_of
from patrickstar._perf_model.cpu_precision import faster_on_cpu
from patrickstar._perf_model.machine_parts import machine_of_parts, parse_disk, parse_rate
from patrickstar._perf_model.machine_spec import Host, Machine, Precision, find_machine
from patrickstar._perf_model.margins import Margins
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import BATCHES
from patrickstar._perf_model.tiling import Tiling
from patrickstar._perf_model.workload import PRODUCTS_ONLY, RECOMPUTED
from patrickstar._plan.plan import Plan
from patrickstar._plan.planned_model import find_planned_model, planned_trace
from patrickstar._plan.search import Search
from patrickstar.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

DEFAULT_MACHINE = "8xV100-32GB"
"""Machine of a plan that names none."""
HERE = "here"
"""Name of this machine, which is measured."""
COUNTS = ("gpus", "nodes", "tp", "ep", "cores", "batch", "sequence")
"""Options that count something, of which there has to be one at least."""


def plan(
    model: "str | nn.Module | Callable[[], nn.Module]",
    *,
    machine: str | Machine | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    nodes: int = 1,
    tp: int = 1,
    ep: int = 1,
    device_memory: str | None = None,
    host_memory: str | None = None,
    host_bandwidth: str | None = None,
    cores: int | None = None,
    disk: str | None = None,
    batch: int | None = None,
    sequence: int = 1024,
    activation_checkpointing: float | Literal["products"] | None = None,
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto",
    lora: int | None = None,
    qlora: int | None = None,
    sample: Any = None,
    loss: "Callable[[Any], torch.Tensor] | None" = None,
    capacity_factor: float | None = None,
    tiled_loss: bool = False,
    tiled_mlp: bool = False,
    dry_run: bool = True,
) -> Plan:
    """Predict whether a model fits a machine, how fast it trains there, and what limits it. Nothing is trained.

    Plans are for AdamW. Frozen parameters count as in a run: without gradients, masters and states. An estimate finds
    the fastest batch, and the least time that any placement of the model data takes. Then the engine runs a step of
    that batch on the simulated machine, on tensors without bytes.

    Args:
        model: Name of an open model such as "llama-3-8b" or of a preset, configuration file, model folder, module, or
            function that builds a module; the latter two need a `sample`.
        machine: Machine, its name, a TOML file, or "here" to measure this one. Default: `gpu`, or 8xV100-32GB.
        gpu: In place of `machine`: name of a GPU such as "rtx4090", in a usual computer.
        gpus: Number of GPUs of a machine to use. Default: all; with `gpu` one.
        nodes: Number of machines, connected by their network.
        tp: GPUs that divide the matrices of each layer (tensor parallelism), for presets.
        ep: GPUs that divide the experts of each layer (expert parallelism), for presets.
        device_memory: Memory budget of each GPU, such as "20GB". Default: its memory less a margin for its context,
            kernels and libraries.
        host_memory: Memory that each host has. A part of it stays free for the system and the process, which the plan
            prints.
        host_bandwidth: Rate of reading and writing the memory of each host with all its cores, such as "170GB/s".
        cores: Number of cores that each host has for training.
        disk: Drive of each host: capacity, and rates if they are known, such as "1TB:7GB/s".
        batch: Sequences per GPU, or per tensor-parallel group. Default: whichever is fastest.
        sequence: Sequence length in tokens; a `sample` has its own.
        activation_checkpointing: Share of the layers that are recomputed in backward: 0.5, True for all, or "products",
            as in `Config`. Default: whichever is fastest.
        precision: Compute precision. Default: the machine's 16-bit one, or what is faster on a CPU that is measured.
        lora: Rank of adapters beside all linear layers but the head, which are trained while the base is frozen in
            that precision, as by `peft.LoraConfig(r=lora, target_modules="all-linear")`. Default: full fine-tuning.
        qlora: The same with a base in 4 bits, as by `transformers.BitsAndBytesConfig(load_in_4bit=True)`.
        sample: Inputs of a module as in training: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        loss: Returns the loss from the output of a module. Default: that of `ps.initialize`.
        capacity_factor: Buffer of each expert relative to the mean number of tokens. Default: no buffers.
        tiled_loss: Compute the loss as `Config(tiled_loss=True)` does, without storing logits.
        tiled_mlp: Compute MLPs and norms as `Config(tiled_mlp=True)` does.
        dry_run: Let the engine run a step on the simulated machine, which takes seconds; else only estimate.

    Returns:
        The plan; a notebook shows it as a page.

    Raises:
        BudgetError: The model does not fit; the message names what would suffice.
        ConfigError: A name is unknown, or options exclude each other.
    """
    given = locals()
    search = SearchOptions(**{each.name: given[each.name] for each in fields(SearchOptions)}).search()
    adapters, tiling = adapters_of(lora, qlora), Tiling(tiled_loss, tiled_mlp)
    if isinstance(model, str):
        if sample is not None or loss is not None:
            raise ConfigError(f"`sample` and `loss` are for modules; {model} has token ids of `sequence`")
        found = find_planned_model(model, sequence, search.machine, capacity_factor, adapters, tiling)
        return search.plan(found)
    if adapters is not None:
        raise ConfigError(f"{adapters}: plan a module with the adapters that it has; `lora` and `qlora` are for names")
    if sample is None:
        raise ConfigError("`sample`: the plan of a module needs inputs as in training")
    # Imported here because PyTorch takes seconds to load.
    from patrickstar._plan.traced_model import sampled_model

    traced = sampled_model(model, sample, loss, tiling)
    if activation_checkpointing is None:
        search = replace(search, checkpointing=traced.checkpointing)
    return search.plan(planned_trace(traced, search.machine))


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Machine, mesh, batch and precision of a plan: those options of `plan` that are the same for all models."""

    machine: str | Machine | None
    gpu: str | None
    gpus: int | None
    nodes: int
    tp: int
    ep: int
    device_memory: str | None
    host_memory: str | None
    host_bandwidth: str | None
    cores: int | None
    disk: str | None
    batch: int | None
    sequence: int
    activation_checkpointing: float | Literal["products"] | None
    precision: str
    dry_run: bool

    def search(self) -> Search:
        """Return the search of these options. Raise ConfigError if one is invalid."""
        for name in COUNTS:
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigError(f"{name}={count}: at least one is needed")
        found = _in_precision(self._machine(), self.precision)
        found = found.model_copy(update={"host": self._host(found.host)})
        found = found if self.device_memory is None else _with_budget(found, self.device_memory)
        margins = Margins(
            device=not found.budgets and self.device_memory is None,
            host=not found.budgets or self.host_memory is not None,
        )
        mesh = Mesh(self.nodes, process_count(found, self.gpus), self.tp, self.ep)
        share = PRODUCTS_ONLY if self.activation_checkpointing == "products" else self.activation_checkpointing
        if share is not None and (isinstance(share, str) or not 0 <= share <= 1):
            raise ConfigError(
                f"activation_checkpointing={share!r}: it is a share of the layers, from 0 to 1, or 'products'"
            )
        checkpointing = RECOMPUTED if share is None else (float(share),)
        batches = BATCHES if self.batch is None else (self.batch,)
        return Search(found, mesh, checkpointing, batches, self.dry_run, margins)

    def _machine(self) -> Machine:
        """Return the machine of parts, or of a name or file; `here` is this machine, measured."""
        if self.gpu is not None:
            if self.machine is not None:
                raise ConfigError(
                    f"gpu={self.gpu!r} and machine={str(self.machine)!r} exclude each other: both are machines"
                )
            return machine_of_parts(self.gpu, self.gpus or 1, self.host_memory, self.disk)
        found = self.machine if isinstance(self.machine, Machine) else _named(self.machine or DEFAULT_MACHINE)
        return found if self.disk is None else found.model_copy(update={"disk": parse_disk(self.disk)})

    def _host(self, host: Host) -> Host:
        """Return a host with the memory, rate and cores that are given."""
        changes: dict[str, Any] = {}
        if self.host_memory is not None:
            changes["memory"] = parse_size(self.host_memory)
        if self.host_bandwidth is not None:
            rate = parse_rate(self.host_bandwidth, "host_bandwidth")
            changes |= {"memory_bandwidth": rate, "update_rate": None, "sockets": 1}
        if self.cores is not None:
            changes["cores"] = self.cores
        return host.model_copy(update=changes)


def _in_precision(machine: Machine, precision: str) -> Machine:
    """Return the machine computing in a precision; "auto" is its own or, on a CPU that was measured, the faster one."""
    if precision not in ("auto", *COMPUTE_DTYPES):
        raise ConfigError(f"precision {precision!r}: choose auto, {', '.join(COMPUTE_DTYPES)}")
    if precision != "auto":
        return machine.in_precision(cast(Precision, precision))
    rates = machine.host.matmul_tflops, machine.host.fp32_tflops
    if machine.gpu is None and machine.measured and rates[0] is not None and rates[1] is not None:
        return machine.in_precision(cast(Precision, faster_on_cpu(rates[0], rates[1])))
    return machine


def _with_budget(machine: Machine, device_memory: str) -> Machine:
    """Return a machine with a budget for its device.

    Raises:
        ConfigError: The device has less memory.
    """
    if machine.gpu is None:
        raise ConfigError(f"device_memory: {machine.name} has no GPU; use host_memory for its memory")
    budget = parse_size(device_memory)
    if budget > machine.gpu.memory:
        raise ConfigError(
            f"device_memory={device_memory!r}: a GPU of {machine.name} has {format_size(machine.gpu.memory)}; "
            f"leave the budget open, or lower it"
        )
    return machine.model_copy(update={"gpu": machine.gpu.model_copy(update={"memory": budget})})


def process_count(machine: Machine, gpus: int | None) -> int:
    """Return the number of processes per node, one per GPU."""
    available = machine.gpu.count if machine.gpu is not None else 1
    if gpus is not None and not 1 <= gpus <= available:
        raise ConfigError(f"gpus={gpus}: {machine.name} has {available}")
    return gpus if gpus is not None else available


def _named(name: str) -> Machine:
    if name != HERE:
        return find_machine(name)
    # Imported here because PyTorch takes seconds to load.
    from patrickstar._dry_run.machine_profile import profile_machine
    from patrickstar.config import Config

    return profile_machine(Config().find_device())
