"""The original PatrickStar, v0.4.3: what its policy fits, moves and takes per step, without a device (paper, §6 to §8).

Fixed chunks in communication groups, 14 bytes of model data per parameter, next-use eviction, optimizer chunks in the
margin, the rest updated on the CPU. Nothing overlaps: a step is the sum of its channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.gpt_costs import HALF, SINGLE, Gpt
from patrickstar._perf_model.machine_spec import Gpu, Host, Links, Machine
from patrickstar.errors import BudgetError, ConfigError
from patrickstar_v043.activation_curve import Moved, move, non_model_bytes

DEVICE_PERCENT = HOST_PERCENT = MARGIN_PERCENT = 80
WARM_UP_PERCENT = 10
"""Shares of a GPU, of the host, of the margin, and of the GPU's share in the warm-up that chunks may fill: the
original's `overall_gpu_mem_ratio`, `overall_cpu_mem_ratio`, `margin_use_ratio` and `warmup_gpu_chunk_mem_ratio`, as
its doc/optimization_options.md gives them. What is left of the host is for processes, embeddings and buffers."""

BATCHES = (4, 8, 16, 32, 64)
"""Sequences per GPU that the published figures are the best of."""

CHUNK_NUMELS = tuple(mebi << 20 for mebi in range(32, 385, 8))
"""Elements per chunk that the search tries. The original's scripts and threads name 32, 48, 64, 128, 184, 256 and 384
Mi."""

OPTIMIZER_BYTES = 3 * SINGLE
"""Per parameter: master, momentum, variance."""

ADAM_BYTES = HALF + 2 * OPTIMIZER_BYTES
COPY_BYTES, CAST_BYTES = 2 * HALF, SINGLE + HALF
"""What the CPU reads and writes per parameter: its Adam; the copy of a gradient that lies on the host into a buffer;
the cast back where the parameter lies on the host."""

DEVICE_ADAM_BYTES = 4 + 6 + 8 + 8 + 12 + 8 + 12 + 8 + 8 + 8 + 16 + 6
"""What its update on the GPU reads and writes per parameter, one PyTorch operator after the other: the gradient copied
and cast, nine operators on fp32 (`torch_adam_update`), the parameter cast back."""

FORWARD_SCORES = 1 + 2 + 2 + 2 + 2.5 + 1
BACKWARD_SCORES = 1 + 1 + 2.5 + 3 + 2 + 2
"""How often operators that are no matrix product, and attention's products, read or write all scores of a layer:
counted over the model that was measured, Hugging Face's BERT, whose attention is not fused. Forward: product, scaling,
mask, softmax, dropout (whose own mask has 8 bits), product. Backward: two products, dropout, softmax, scaling, two
products."""

FORWARD_HIDDEN = 4 * 2 + 2 * (2.5 + 3 + 2) + 4 * 2
BACKWARD_HIDDEN = 4 * 2 + 2 * (2.5 + 3 + 4) + 4 * 3 + 9
"""The same of all hidden units: four permuted; dropout, sum and norm, twice; the GELU, four times as wide; and in
backward the biases' gradients, over nine widths."""


@dataclass(frozen=True)
class ResourceSeconds:
    """Seconds of one step, by who is busy. While one is, the others wait."""

    compute_s: float
    h2d_s: float
    d2h_s: float
    collectives_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        """The step."""
        return self.compute_s + self.h2d_s + self.d2h_s + self.collectives_s + self.update_s


@dataclass(frozen=True)
class Placement:
    """Where a process has its share of the chunks, and what a step moves of them.

    chunks: of each list. in_margin: whose optimizer chunks are in the margin, and updated on the GPU. forced: whose
    are on the GPU only because the host is full; they change places with others for their update on the CPU.
    """

    chunk_numel: int
    chunks: int
    in_margin: int
    forced: int
    moved: Moved

    @property
    def on_host(self) -> list[int]:
        """The chunks that are updated on the CPU."""
        return list(range(self.in_margin, self.chunks))

    @property
    def crossing(self) -> int:
        """How many of them have their gradients on the GPU."""
        return sum(chunk in self.moved.held for chunk in self.on_host)


@dataclass(frozen=True)
class OriginalStep:
    """One step: `batch` sequences per GPU, 10^12 operations per second of all GPUs as the paper counts them."""

    batch: int
    placement: Placement
    channels: ResourceSeconds
    tflops: float


def best_step(gpt: Gpt, machine: Machine, gpus: int, batches: Sequence[int] = BATCHES) -> OriginalStep:
    """The fastest step over the batches that fit, with the chunk size that wastes least.

    Raises BudgetError if no batch fits, ConfigError if the machine hasn't so many GPUs.
    """
    chunk_numel = search_chunk_numel(gpt, gpu_of(machine, gpus), gpus)
    steps, refusals = [], []
    for batch in batches:
        try:
            steps.append(simulate_original(gpt, machine, gpus, batch, chunk_numel))
        except BudgetError as error:
            refusals.append(error)
    if not steps:
        raise min(refusals, key=lambda error: error.short_bytes or 0)
    return max(steps, key=lambda step: step.tflops)


def gpu_of(machine: Machine, gpus: int) -> Gpu:
    """The machine's kind of GPU. Raises ConfigError if it hasn't so many."""
    count = machine.gpu.count if machine.gpu else 0
    if machine.gpu is None or not 0 < gpus <= count:
        raise ConfigError(f"{gpus} GPUs were asked for, and {machine.name} has {count}")
    return machine.gpu


def simulate_original(gpt: Gpt, machine: Machine, gpus: int, batch: int, chunk_numel: int) -> OriginalStep:
    """A step with `batch` sequences on each of `gpus` GPUs of the machine, and chunks of `chunk_numel` elements.

    Raises BudgetError, with the bytes that are missing, if it doesn't fit.
    """
    gpu, links, tokens = gpu_of(machine, gpus), machine.links, batch * gpt.sequence
    assert links is not None, "read_machine refuses GPUs without links"
    placement = place(gpt, gpu, machine.host, gpus, batch, chunk_numel)
    margin_bytes = placement.in_margin * chunk_numel * DEVICE_ADAM_BYTES
    channels = ResourceSeconds(
        compute_s=compute_seconds(gpt, gpu, batch),
        **_link_seconds(placement, machine.host, links, gpus, looked_up_bytes=tokens * gpt.hidden * SINGLE),
        update_s=margin_bytes / gpu.memory_bandwidth + _host_seconds(gpt, placement, machine.host, gpus),
    )
    return OriginalStep(batch, placement, channels, gpus * gpt.paper_operations(tokens) / channels.total_s / 1e12)


def place(gpt: Gpt, gpu: Gpu, host: Host, gpus: int, batch: int, chunk_numel: int) -> Placement:
    """Where chunks lie: the margin is what the peak of non-model data leaves beside all of the process's `param16`.

    Raises BudgetError if the host and the GPU can't hold them.
    """
    chunks = -(-chunk_count(gpt, chunk_numel) // gpus)
    param16_bytes, optimizer_bytes = chunk_numel * HALF, chunk_numel * OPTIMIZER_BYTES
    host_bytes = host.memory * HOST_PERCENT // 100 // gpus
    # Beside the chunks lie those of the group that is computed with, and the buffer that parameters return through.
    beside_bytes = gpus * param16_bytes + chunk_numel * SINGLE
    rooms = [device_bytes(gpu) - beside_bytes - nbytes for nbytes in non_model_bytes(gpt, batch, chunks)]
    margin_bytes = (min(rooms) - chunks * param16_bytes) * MARGIN_PERCENT // 100
    in_margin = min(chunks, max(0, margin_bytes // optimizer_bytes))
    forced = 0
    while True:
        free = [(room - (in_margin + forced) * optimizer_bytes) // param16_bytes for room in rooms]
        spilled = chunks - min(chunks, min(free))
        excess_bytes = (chunks - in_margin - forced) * optimizer_bytes + spilled * param16_bytes - host_bytes
        if min(free) < 1 or forced > chunks - in_margin:
            short_bytes = max(param16_bytes * (1 - min(free)), excess_bytes)
            raise BudgetError(
                f"{gpt.numel / 1e9:.1f}e9 parameters, {batch} sequences on each of {gpus} GPUs: "
                f"{format_size(short_bytes)} too little memory for each process",
                short_bytes,
            )
        if excess_bytes <= 0:
            return Placement(chunk_numel, chunks, in_margin, forced, move(free, chunks))
        forced += -(-excess_bytes // optimizer_bytes)


def device_bytes(gpu: Gpu) -> int:
    """What chunks and non-model data may take of a GPU."""
    return gpu.memory * DEVICE_PERCENT // 100


@cache
def chunk_count(gpt: Gpt, chunk_numel: int) -> int:
    """Chunks of each list: parameters in creation order, none straddles. Embeddings are not among them."""
    count, room = 0, 0
    for _ in range(gpt.layers):
        for numel in gpt.layer_tensors():
            if numel > room:
                count, room = count + 1, chunk_numel
            room -= numel
    return count


def search_chunk_numel(gpt: Gpt, gpu: Gpu, gpus: int) -> int:
    """The chunk size that wastes least (paper, §6.1), groups filled up, if the warm-up can hold a group of them.

    Raises BudgetError if the largest parameter needs larger chunks.
    """
    least, warm_up_bytes = max(gpt.layer_tensors()), device_bytes(gpu) * WARM_UP_PERCENT // 100
    sizes = [numel for numel in CHUNK_NUMELS if least <= numel and gpus * numel * HALF <= warm_up_bytes]
    if not sizes:
        short_bytes = gpus * least * HALF - warm_up_bytes
        raise BudgetError(
            f"a group of {gpus} chunks that hold a parameter of {least} elements is larger than "
            f"{format_size(warm_up_bytes)}, the warm-up's share of a GPU",
            short_bytes if short_bytes > 0 else None,
        )
    return min(sizes, key=lambda numel: numel * -(-chunk_count(gpt, numel) // gpus))


def _link_seconds(placement: Placement, host: Host, links: Links, gpus: int, looked_up_bytes: int) -> dict[str, float]:
    """The channels over links: chunks, gradients and parameters of the update, what the CPU looked up, and collectives.

    Chunks are evicted into memory that is allocated and page-locked for each of them (its `Chunk.move`). Gradients that
    lie on a GPU go down in 16 bits, and parameters come back in 32, to be cast there. A group is gathered in forward
    and backward, and its gradients are summed: 6 (p - 1) / p bytes per parameter.
    """
    numel, moved = placement.chunk_numel, placement.moved
    crossing, swapped_bytes = placement.crossing * numel, placement.forced * numel * OPTIMIZER_BYTES
    up, down = links.h2d_per_gpu(gpus), links.d2h_per_gpu(gpus)
    fetched_bytes = moved.fetched * numel * HALF + swapped_bytes
    evicted_bytes = moved.evicted * numel * HALF + swapped_bytes
    sent_bytes = 3 * (gpus - 1) * placement.chunks * numel * HALF
    return {
        "h2d_s": (fetched_bytes + crossing * SINGLE + looked_up_bytes) / up,
        "d2h_s": evicted_bytes / min(down, host.page_lock or down) + (crossing * HALF + looked_up_bytes) / down,
        "collectives_s": sent_bytes / links.gpu_gpu if links.gpu_gpu and gpus > 1 else 0.0,
    }


def compute_seconds(gpt: Gpt, gpu: Gpu, batch: int) -> float:
    """Forward, recomputation and backward: products at the rate of their size, the rest at the memory's."""
    tokens = batch * gpt.sequence
    products = gpt.operations(tokens) / gpu.matmul_rate(gpt.hidden)
    scores = (2 * FORWARD_SCORES + BACKWARD_SCORES) * gpt.score_numel(batch)
    hidden = (2 * FORWARD_HIDDEN + BACKWARD_HIDDEN) * tokens * gpt.hidden
    return products + gpt.layers * (scores + hidden) * HALF / gpu.memory_bandwidth


def _host_seconds(gpt: Gpt, placement: Placement, host: Host, gpus: int) -> float:
    """The CPU's update of all processes, at once.

    Each has the whole embedding, in 32 bits, whose gradients are summed through the host's memory: two passes, read and
    written. Each runs one thread per core that it has to itself; cores left over by the division are idle.
    """
    updated = len(placement.on_host) * placement.chunk_numel
    lying = updated - placement.crossing * placement.chunk_numel
    embedding = gpt.embedding_numel * (SINGLE + 2 * OPTIMIZER_BYTES)
    summed = 4 * gpt.embedding_numel * SINGLE if gpus > 1 else 0
    nbytes = updated * ADAM_BYTES + lying * (COPY_BYTES + CAST_BYTES) + embedding + summed
    return gpus * nbytes / host.update_bandwidth(gpus, max(1, host.cores // gpus))
