"""Text of a plan, as ``patrickstar plan`` prints it."""

from patrickstar._layout.byte_size import format_size
from patrickstar._layout.schema import COMPUTE_DTYPES
from patrickstar._perf_model.adapters import Adapters
from patrickstar._perf_model.checkpoint_cost import checkpoint_cost
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import ChannelLoad, Estimate
from patrickstar._perf_model.text_tables import channels_table, format_seconds, memory_table, rows
from patrickstar._perf_model.workload import PRODUCTS_ONLY, Workload, option_of
from patrickstar._plan.prediction import Prediction
from patrickstar._plan.upgrades import ENDURANCE, Upgrade, drive_bytes, lock_free


def plan_text(plan: Prediction) -> str:
    """Return the plan as text: the answer first, then what it consists of, and what to set."""
    best = plan.best
    work = best.workload
    unit = "process" if best.mesh.tp == 1 else "tensor-parallel group"
    activations = activations_text(work)
    summary = (
        ("model", f"{plan.model.name}, {_count(work.all_params)} parameters{_trained(work)}: it fits"),
        ("machine", _described(plan.machine, best.mesh)),
        (
            "batch",
            f"{work.batch} x {plan.model.sequence} tokens per {unit}, activations {activations}; "
            f"at most {plan.max_batch} fit",
        ),
        ("model data", f"{format_size(best.model_data_bytes)} per process, on all tiers together"),
        *(("margins", text) for text in plan.margins),
        *_step_rows(plan),
        *remarks(plan),
        *(("with", f"{each.name}: {gain(each, best)}") for each in plan.upgrades),
    )
    parts = (
        answer(plan),
        rows(summary),
        channels_table(loads(plan), plan.step_s),
        memory_table(tiers(plan.budgets, best)),
        _choices(best),
        f"to set:\n{config_text(plan)}",
    )
    return "\n".join(parts)


def activations_text(work: Workload) -> str:
    """Return what happens to activations between forward and backward."""
    share = work.checkpointing
    if share in (0, 1):
        text = "recomputed in backward" if share else "kept for backward"
    else:
        text = "results of products kept, others recomputed in backward"
        if share != PRODUCTS_ONLY:
            text = f"of {share:.0%} of the layers recomputed in backward; of the rest {text}"
    return f"{text}, {work.offloaded:.0%} of what is kept on the host" if work.offloaded else text


def answer(plan: Prediction) -> str:
    """Return in one sentence whether the model fits and how fast it trains, with the bound."""
    name, step = plan.model.name.partition(",")[0], f"{plan.batch} x {plan.model.sequence:,} tokens"
    takes = "is estimated to take" if plan.dry_run is None else "takes in a dry run of the engine"
    return (
        f"{name} fits {plan.machine.name} and trains at {speed(plan)}: a step of {step} {takes} "
        f"{format_seconds(plan.step_s)}; no step takes less than {format_seconds(plan.bound_s)}, because of "
        f"{plan.limited_by}."
    )


def _step_rows(plan: Prediction) -> list[tuple[str, str]]:
    best, found = plan.best, []
    if plan.dry_run is not None:
        waits_s = sum(wait.seconds for wait in plan.dry_run.waits)
        found.append(
            (
                "dry run",
                f"{format_seconds(plan.step_s)} per step, of which computation waits {format_seconds(waits_s)}; "
                f"`patrickstar train --dry-run --machine` shows such a step in full",
            )
        )
        if plan.dry_run.page_lock_s:
            found.append(("first step", plan.dry_run.first_step))
    found.append(
        (
            "estimate",
            f"{format_seconds(best.seconds)} per step, of which the busiest resource alone takes "
            f"{format_seconds(best.busiest.seconds)}: "
            f"{plan.limited_by}",
        )
    )
    found.append(("speed", f"{plan.tflops:.1f} TFLOPS per process, {speed(plan)}"))
    return found


def remarks(plan: Prediction) -> list[tuple[str, str]]:
    """Return a name and a text for each further property of the plan."""
    best = plan.best
    return [
        *_efficiency_row(plan),
        *_blocking_row(best),
        ("transfers", f"hidden behind computation from {best.free_tokens:,} tokens per process and step"),
        ("delayed", "updates would gain nothing here: a step takes as long as its busiest resource in either case"),
        *_lock_free_row(plan.budgets, best),
        *_checkpoint_row(plan.machine, best),
        *_drive_row(plan),
    ]


def _trained(work: Workload) -> str:
    if not work.frozen_params:
        return ""
    return f", of which {work.trained_params / 1e6:,.1f} million are trained"


def config_text(plan: Prediction) -> str:
    """Return the configuration to paste. Budgets follow from the machine that trains."""
    machine, best = plan.machine, plan.best
    disk = ', disk="FOLDER ON THE DRIVE"' if machine.disk is not None and best.disk_bytes else ""
    torchrun = "" if best.processes == 1 else f"torchrun --nproc-per-node {best.mesh.gpus} script.py\n"
    share = option_of(best.workload.checkpointing)
    recompute = f", activation_checkpointing={True if share == 1 else share!r}" if share else ""
    offload = f", activation_offload={best.workload.offloaded}" if best.workload.offloaded else ""
    tiled = "".join(f", {name}=True" for name, value in plan.model.tiling._asdict().items() if value)
    options = f'precision="{machine.precision}"{disk}{recompute}{offload}{tiled}'
    config = f"config = ps.Config({options}, optimizer=ps.AdamW(lr=1e-4))"
    adapters = "" if plan.model.adapters is None else _adapters_text(plan.model.adapters, machine.precision)
    return f"{torchrun}{adapters}{config}\nengine, optimizer = ps.initialize(model, config)"


def _adapters_text(adapters: Adapters, precision: str) -> str:
    """Return the lines that load the base and add adapters."""
    dtype = "torch." + COMPUTE_DTYPES[precision]
    quantized, option = "", ""
    if adapters.quantized:
        quantized = (
            f'in_4bit = BitsAndBytesConfig(\n    load_in_4bit=True, bnb_4bit_quant_type="nf4", '
            f"bnb_4bit_compute_dtype={dtype}\n)\n"
        )
        option = ", quantization_config=in_4bit"
    return (
        f"{quantized}base = AutoModelForCausalLM.from_pretrained(FOLDER, dtype={dtype}{option})\n"
        f'adapters = LoraConfig(\n    r={adapters.rank}, target_modules="all-linear", task_type="CAUSAL_LM"\n)\n'
        f"model = get_peft_model(base, adapters)\n"
    )


def _drive_row(plan: Prediction) -> list[tuple[str, str]]:
    """Return how long the drive of a node lasts."""
    days, disk = plan.drive_days, plan.machine.disk
    if days is None or disk is None:
        return []
    endurance, written = f"{ENDURANCE * disk.capacity / 1e12:,.0f} TB", drive_bytes(plan.best)
    text = (
        f"is written {format_size(written)} per step, and lasts {days:,.1f} days of training if it may be written "
        f"{endurance} (usual for its capacity). Many drives write {disk.write / 1e9:.3g} GB/s into a cache only, "
        f"which is full after some hundred GB, and then at a third of it or less"
    )
    return [("drive", text)]


def gain(upgrade: Upgrade, best: Estimate) -> str:
    """Return what a change of the machine adds to the speed: a difference, by estimates of both machines."""
    if upgrade.estimate is None:
        return "it does not fit"
    percent = round(100 * upgrade.gain(best))
    return f"{percent:+d} % tokens/s" if percent else "no gain"


def speed(plan: Prediction) -> str:
    """Return the tokens per second with the digits that tell."""
    tokens = plan.tokens_per_s
    return f"{tokens:,.0f} tokens/s" if tokens >= 100 else f"{tokens:.3g} tokens/s"


def _count(params: int) -> str:
    return f"{params / 1e9:.2f} billion" if params >= 1e9 else f"{params / 1e6:.3g} million"


def _percent(share: float) -> str:
    """Format a share of a linear program's solution, which may be below zero by a rounding error."""
    return f"{max(0.0, share):.0%}"


def _described(machine: Machine, mesh: Mesh) -> str:
    devices = f"{mesh.gpus} GPUs" if mesh.gpus > 1 else "one device"
    if mesh.nodes == 1:
        text = f"{machine.name}, {devices}"
    else:
        text = f"{mesh.nodes} nodes, each {machine.name} with {devices}: {mesh.processes} processes"
    if mesh.nodes > 1 and mesh.dense.replicas == 1:
        text += "; one replica, whose parameters are gathered from all nodes"
    elif mesh.nodes > 1:
        nodes = "one node" if mesh.replica_nodes == 1 else f"{mesh.replica_nodes} nodes"
        params = "parameters" if mesh.ep == 1 else "dense parameters"
        text += f"; {mesh.dense.replicas} replicas of {nodes}, each with a copy of the {params}"
    parts = [f"{name} parallelism {size}" for name, size in (("tensor", mesh.tp), ("expert", mesh.ep)) if size > 1]
    return "; ".join([text, *parts])


def _efficiency_row(plan: Prediction) -> list[tuple[str, str]]:
    """Return the tokens per second and GPU relative to one GPU and to one node."""
    smaller = [
        ("one GPU", plan.one_gpu, plan.best.mesh.processes > 1),
        ("one node", plan.one_node, plan.best.mesh.nodes > 1),
    ]
    texts = []
    for name, reference, is_smaller in smaller:
        if is_smaller:
            share = plan.efficiency(reference)
            texts.append(f"{share:.2f} times {name}'s" if share is not None else f"{name} alone cannot train it")
    return [("efficiency", f"tokens/s per GPU: {', '.join(texts)}")] if texts else []


def _blocking_row(best: Estimate) -> list[tuple[str, str]]:
    """Return what computation waits for, if operators contain collectives."""
    if not best.mesh.lockstep:
        return []
    compute = next(channel for channel in best.channels if channel.name == "compute")
    text = f"{compute.blocking_s:.2f} s of the computation waits for collectives of tensor and expert parallelism"
    experts = best.workload.experts
    if experts is not None:
        text += f"; the busiest process has {experts.imbalance:.2f} times the mean number of routed tokens"
    return [("waits", text)]


def _lock_free_row(machine: Machine, best: Estimate) -> list[tuple[str, str]]:
    """Return what lock-free updates would change, if states are on disk."""
    if best.shares.in_ram >= 1 or best.processes > 1:
        return []
    late = lock_free(machine, best)
    if late is None:
        return [("lock-free", "updates would gain nothing: their buffers do not fit, or no step waits for the disk")]
    text = (
        f"updates would shorten the estimated step from {format_seconds(best.seconds)} to "
        f"{format_seconds(late.seconds)} with max_staleness={late.staleness} (not exact)"
    )
    return [("lock-free", text)]


def _checkpoint_row(machine: Machine, best: Estimate) -> list[tuple[str, str]]:
    """Return the cost of a checkpoint on the disks of the nodes, or over their network."""
    cost = checkpoint_cost(best.workload, machine, best.mesh)
    if cost is None:
        return []
    where = "the disk" if machine.disk is not None else "the network"
    each = " of each node" if best.mesh.nodes > 1 else ""
    text = f"{format_size(cost.nbytes)}: {cost.save_s:.1f} s to write at the rate of {where}{each}, {cost.load_s:.1f} s"
    return [("checkpoint", f"{text} to read after a restart")]


def loads(plan: Prediction) -> list[tuple[str, float, str]]:
    """Return name, busy seconds and amount of each resource, by the dry run or, without one, by the estimate."""
    if plan.dry_run is None:
        return [(load.name, load.seconds, _amount(load)) for load in plan.best.channels]
    amount = next(_amount(load) for load in plan.best.channels if load.name == "compute")
    used = [(each.name, each.busy_s, format_size(each.nbytes)) for each in plan.dry_run.channels if each.nbytes]
    return [("compute", plan.dry_run.compute_s, amount), *used]


def _amount(channel: ChannelLoad) -> str:
    return f"{channel.amount / 1e12:,.1f}e12 op." if channel.name == "compute" else format_size(int(channel.amount))


def tiers(machine: Machine, best: Estimate) -> list[tuple[str, int, int]]:
    """Return name, used bytes and capacity of each tier."""
    non_model, each = best.workload.non_model_bytes, "each " if best.mesh.nodes > 1 else ""
    if machine.gpu is not None:
        found = [
            ("each GPU", best.device_bytes, machine.gpu.memory),
            ("- non-model data", non_model, machine.gpu.memory),
            (f"{each}host", best.host_bytes, machine.host.memory),
        ]
    else:
        found = [
            ("RAM", best.device_bytes + best.host_bytes, machine.host.memory),
            ("- non-model data", non_model, machine.host.memory),
        ]
    if machine.disk is not None:
        found.append((f"{each}disk", best.disk_bytes, machine.disk.capacity))
    return found


def _choices(best: Estimate) -> str:
    shares = best.shares
    streamed = max(0.0, 1 - shares.resident - shares.on_host)
    in_ram = f"; of those outside the device, {_percent(shares.in_ram)} are stored in RAM" if shares.in_ram < 1 else ""
    paged = f", {_percent(shares.paged)} are stored on disk" if shares.paged else ""
    experts = ""
    if best.expert_shares is not None:
        of = best.expert_shares
        experts = (
            f" Of the experts' states {_percent(of.resident)} stay on the device and {_percent(of.on_host)} are "
            f"updated on the host; of their parameters {_percent(of.retained)} stay on the device."
        )
    trained = frozen = ""
    if best.frozen_shares is not None:
        paged_away = f" and {_percent(best.frozen_shares.paged)} are on disk" if best.frozen_shares.paged else ""
        trained, frozen = (
            " trained",
            f" Of the frozen parameters {_percent(best.frozen_shares.retained)} stay on the device{paged_away}.",
        )
    return (
        f"by the estimate: of the optimizer states {_percent(shares.resident)} stay on the device, "
        f"{_percent(shares.on_host)} are updated on the host and {_percent(streamed)} are copied to the device for "
        f"their update{in_ram}; of the{trained} parameters {_percent(shares.retained)} stay on the device from forward "
        f"to backward{paged}.{experts}{frozen} These shares minimize the time of the busiest resource, "
        f"{best.busiest.name} (a linear program); the batch maximizes tokens per second."
    )
