"""Simulation of the original PatrickStar v0.4.3: memory, transfers and time of a step (paper, §6 to §8).

Fixed chunks in communication groups, 14 bytes of model data per parameter, next-use eviction, optimizer chunks in the
margin, the rest updated on the CPU. Nothing overlaps: the time of a step is the sum over its channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from papers.counts import embedding_numel, layer_tensors, paper_operations, score_numel

from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.gpt_costs import Gpt
from patrickstar._perf_model.machine_spec import Gpu, Host, Links, Machine
from patrickstar._perf_model.workload import HALF, SINGLE
from patrickstar.errors import BudgetError, ConfigError
from patrickstar_v043.activation_curve import ChunkTransfers, non_model_bytes, simulate_transfers

DEVICE_PERCENT = HOST_PERCENT = MARGIN_PERCENT = 80
WARM_UP_PERCENT = 10
"""Percentages that chunks may fill: of a GPU, of the host, of the margin, and of the GPU's part in the warm-up. They
are the original's `overall_gpu_mem_ratio`, `overall_cpu_mem_ratio`, `margin_use_ratio` and
`warmup_gpu_chunk_mem_ratio`, from its doc/optimization_options.md. The rest of the host is for processes, embeddings
and buffers."""

BATCHES = (4, 8, 16, 32, 64)
"""Sequences per GPU; the published figures are the best over these."""

CHUNK_NUMELS = tuple(mebi << 20 for mebi in range(32, 385, 8))
"""Candidate elements per chunk. The original's scripts and issues use 32, 48, 64, 128, 184, 256 and 384 Mi."""

OPTIMIZER_BYTES = 3 * SINGLE
"""Bytes per parameter of master, momentum and variance."""

ADAM_BYTES = HALF + 2 * OPTIMIZER_BYTES
COPY_BYTES, CAST_BYTES = 2 * HALF, SINGLE + HALF
"""Bytes per parameter that the CPU reads and writes: in Adam; in the copy of a host gradient into a buffer; in the
downcast of a host parameter."""

DEVICE_ADAM_BYTES = 4 + 6 + 8 + 8 + 12 + 8 + 12 + 8 + 8 + 8 + 16 + 6
"""Bytes per parameter that its update on the GPU reads and writes, as a sequence of PyTorch operators: copy and cast of
the gradient, nine fp32 operators (`torch_adam_update`), downcast of the parameter."""

FORWARD_SCORES = 1 + 2 + 2 + 2 + 2.5 + 1
BACKWARD_SCORES = 1 + 1 + 2.5 + 3 + 2 + 2
"""Number of times that the attention products and all other memory-bound operators read or write the scores of a layer,
counted over the measured model: Hugging Face's BERT, whose attention is not fused. Forward: product, scaling, mask,
softmax, dropout (with an 8-bit mask), product. Backward: two products, dropout, softmax, scaling, two products."""

FORWARD_HIDDEN = 4 * 2 + 2 * (2.5 + 3 + 2) + 4 * 2
BACKWARD_HIDDEN = 4 * 2 + 2 * (2.5 + 3 + 4) + 4 * 3 + 9
"""Same count for all hidden units: four permutations; dropout, sum and norm, twice; the GELU, four times as wide; in
backward also the gradients of the biases, over nine widths."""


@dataclass(frozen=True)
class ResourceSeconds:
    """Seconds of one step by resource; only one resource is busy at a time."""

    compute_s: float
    h2d_s: float
    d2h_s: float
    collectives_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return self.compute_s + self.h2d_s + self.d2h_s + self.collectives_s + self.update_s


@dataclass(frozen=True)
class Placement:
    """Placement of the chunks of one process, and the transfers of a step.

    `chunks`: number per chunk list. `in_margin`: number whose optimizer chunks are in the margin and updated on the
    GPU. `forced`: number whose optimizer chunks are on the GPU only because the host is full; they are swapped with
    others for their update on the CPU.
    """

    chunk_numel: int
    chunks: int
    in_margin: int
    forced: int
    transfers: ChunkTransfers

    @property
    def on_host(self) -> list[int]:
        """Chunks that are updated on the CPU."""
        return list(range(self.in_margin, self.chunks))

    @property
    def device_grads(self) -> int:
        """Number of them with gradients on the GPU."""
        return sum(chunk in self.transfers.held for chunk in self.on_host)


@dataclass(frozen=True)
class OriginalStep:
    """Result of one step: `batch` sequences per GPU, and the TFLOPS of all GPUs by the paper's count."""

    batch: int
    placement: Placement
    channels: ResourceSeconds
    tflops: float


def best_step(gpt: Gpt, machine: Machine, gpus: int, batches: Sequence[int] = BATCHES) -> OriginalStep:
    """Return the fastest step over the batches that fit, with the chunk size that wastes least.

    Raises:
        BudgetError: No batch fits.
        ConfigError: The machine has fewer GPUs.
    """
    chunk_numel = search_chunk_numel(gpt, gpu_of(machine, gpus), gpus)
    steps, errors = [], []
    for batch in batches:
        try:
            steps.append(simulate_original(gpt, machine, gpus, batch, chunk_numel))
        except BudgetError as error:
            errors.append(error)
    if not steps:
        raise min(errors, key=lambda error: error.short_bytes or 0)
    return max(steps, key=lambda step: step.tflops)


def gpu_of(machine: Machine, gpus: int) -> Gpu:
    """Return the GPU spec of a machine; raise ConfigError if it has fewer than `gpus`."""
    count = machine.gpu.count if machine.gpu else 0
    if machine.gpu is None or not 0 < gpus <= count:
        raise ConfigError(f"{gpus} GPUs were requested, but {machine.name} has {count}")
    return machine.gpu


def simulate_original(gpt: Gpt, machine: Machine, gpus: int, batch: int, chunk_numel: int) -> OriginalStep:
    """Simulate a step with `batch` sequences on each of `gpus` GPUs and chunks of `chunk_numel` elements.

    Raises:
        BudgetError: The step does not fit; the error has the missing bytes.
    """
    gpu, links, tokens = gpu_of(machine, gpus), machine.links, batch * gpt.sequence
    assert links is not None, "read_machine rejects GPUs without links"
    placement = place(gpt, gpu, machine.host, gpus, batch, chunk_numel)
    margin_bytes = placement.in_margin * chunk_numel * DEVICE_ADAM_BYTES
    channels = ResourceSeconds(
        compute_s=compute_seconds(gpt, gpu, batch),
        **_link_seconds(placement, machine.host, links, gpus, looked_up_bytes=tokens * gpt.hidden * SINGLE),
        update_s=margin_bytes / gpu.memory_bandwidth + _host_seconds(gpt, placement, machine.host, gpus),
    )
    return OriginalStep(batch, placement, channels, gpus * paper_operations(gpt, tokens) / channels.total_s / 1e12)


def place(gpt: Gpt, gpu: Gpu, host: Host, gpus: int, batch: int, chunk_numel: int) -> Placement:
    """Place the chunks; the margin is the GPU memory left by peak non-model data and all `param16` of the process.

    Raises:
        BudgetError: The host and the GPU cannot hold the chunks.
    """
    chunks = -(-chunk_count(gpt, chunk_numel) // gpus)
    param16_bytes, optimizer_bytes = chunk_numel * HALF, chunk_numel * OPTIMIZER_BYTES
    host_bytes = host.memory * HOST_PERCENT // 100 // gpus
    # Additional memory: the gathered group in use, and the buffer for parameters copied back to the GPU.
    buffer_bytes = gpus * param16_bytes + chunk_numel * SINGLE
    capacities = [device_bytes(gpu) - buffer_bytes - nbytes for nbytes in non_model_bytes(gpt, batch, chunks)]
    margin_bytes = (min(capacities) - chunks * param16_bytes) * MARGIN_PERCENT // 100
    in_margin = min(chunks, max(0, margin_bytes // optimizer_bytes))
    forced = 0
    while True:
        free = [(capacity - (in_margin + forced) * optimizer_bytes) // param16_bytes for capacity in capacities]
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
            return Placement(chunk_numel, chunks, in_margin, forced, simulate_transfers(free, chunks))
        forced += -(-excess_bytes // optimizer_bytes)


def device_bytes(gpu: Gpu) -> int:
    """Return the bytes of a GPU available to chunks and non-model data."""
    return gpu.memory * DEVICE_PERCENT // 100


@cache
def chunk_count(gpt: Gpt, chunk_numel: int) -> int:
    """Return the chunks per list: parameters in creation order, none split over two; without embeddings."""
    count, free_numel = 0, 0
    for _ in range(gpt.layers):
        for numel in layer_tensors(gpt):
            if numel > free_numel:
                count, free_numel = count + 1, chunk_numel
            free_numel -= numel
    return count


def search_chunk_numel(gpt: Gpt, gpu: Gpu, gpus: int) -> int:
    """Return the chunk size that wastes least (paper, §6.1) of those whose groups fit the warm-up memory.

    Raises:
        BudgetError: The largest parameter needs larger chunks.
    """
    min_numel, warm_up_bytes = max(layer_tensors(gpt)), device_bytes(gpu) * WARM_UP_PERCENT // 100
    sizes = [numel for numel in CHUNK_NUMELS if min_numel <= numel and gpus * numel * HALF <= warm_up_bytes]
    if not sizes:
        short_bytes = gpus * min_numel * HALF - warm_up_bytes
        raise BudgetError(
            f"a group of {gpus} chunks for a parameter of {min_numel} elements exceeds "
            f"{format_size(warm_up_bytes)}, the part of a GPU for the warm-up",
            short_bytes if short_bytes > 0 else None,
        )
    return min(sizes, key=lambda numel: numel * -(-chunk_count(gpt, numel) // gpus))


def _link_seconds(placement: Placement, host: Host, links: Links, gpus: int, looked_up_bytes: int) -> dict[str, float]:
    """Seconds of the links: chunks, gradients and parameters of the update, CPU embedding lookups, and collectives.

    Each chunk is evicted into newly allocated and page-locked memory (its `Chunk.move`). Gradients on a GPU are copied
    to the host in 16 bits; parameters are copied back in 32 bits and cast there. A group is gathered in forward and
    backward, and its gradients are reduced: 6 (p - 1) / p bytes per parameter.
    """
    numel, transfers = placement.chunk_numel, placement.transfers
    grad_numel, swapped_bytes = placement.device_grads * numel, placement.forced * numel * OPTIMIZER_BYTES
    h2d, d2h = links.h2d_per_gpu(gpus), links.d2h_per_gpu(gpus)
    fetched_bytes = transfers.fetched * numel * HALF + swapped_bytes
    evicted_bytes = transfers.evicted * numel * HALF + swapped_bytes
    sent_bytes = 3 * (gpus - 1) * placement.chunks * numel * HALF
    return {
        "h2d_s": (fetched_bytes + grad_numel * SINGLE + looked_up_bytes) / h2d,
        "d2h_s": evicted_bytes / min(d2h, host.page_lock or d2h) + (grad_numel * HALF + looked_up_bytes) / d2h,
        "collectives_s": sent_bytes / links.gpu_gpu if links.gpu_gpu and gpus > 1 else 0.0,
    }


def compute_seconds(gpt: Gpt, gpu: Gpu, batch: int) -> float:
    """Seconds of forward, recomputation and backward: products at their rate, the rest at memory bandwidth."""
    tokens = batch * gpt.sequence
    products = gpt.operations(tokens) / gpu.matmul_rate(gpt.hidden)
    scores = (2 * FORWARD_SCORES + BACKWARD_SCORES) * score_numel(gpt, batch)
    hidden = (2 * FORWARD_HIDDEN + BACKWARD_HIDDEN) * tokens * gpt.hidden
    return products + gpt.layers * (scores + hidden) * HALF / gpu.memory_bandwidth


def _host_seconds(gpt: Gpt, placement: Placement, host: Host, gpus: int) -> float:
    """Seconds of the CPU update of all processes, which run at the same time.

    Each process has the whole embedding in 32 bits; its gradients are summed through host memory in two passes, read
    and written. Each runs one thread per core of its equal part; remaining cores are idle.
    """
    updated = len(placement.on_host) * placement.chunk_numel
    host_grads = updated - placement.device_grads * placement.chunk_numel
    embedding = embedding_numel(gpt) * (SINGLE + 2 * OPTIMIZER_BYTES)
    summed = 4 * embedding_numel(gpt) * SINGLE if gpus > 1 else 0
    nbytes = updated * ADAM_BYTES + host_grads * (COPY_BYTES + CAST_BYTES) + embedding + summed
    return gpus * nbytes / host.update_bandwidth(gpus, max(1, host.cores // gpus))
