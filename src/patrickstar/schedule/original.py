"""The original PatrickStar, v0.4.3: what its policy fits, moves and takes per step, without a device (paper, §6 to §8).

Fixed chunks in communication groups, 14 bytes of model data per parameter, next-use eviction, optimizer chunks in the
margin, the rest updated on the CPU. Nothing overlaps: a step is the sum of its lanes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from patrickstar.errors import BudgetError
from patrickstar.layout.lists import scheme_for
from patrickstar.layout.mapping import ParamSpec, build_layout
from patrickstar.layout.sizes import format_size
from patrickstar.schedule.gpt import HALF, SINGLE, Gpt
from patrickstar.schedule.machine import Gpu, Host, Links, Machine

DEVICE_PERCENT = HOST_PERCENT = MARGIN_PERCENT = 80
WARM_UP_PERCENT = 10
"""Shares of a GPU, of the host, of the margin, and of the GPU's share in the warm-up that chunks may fill: the
original's `overall_gpu_mem_ratio`, `overall_cpu_mem_ratio`, `margin_use_ratio` and `warmup_gpu_chunk_mem_ratio`, whose
defaults its doc/optimization_options.md gives. What is left of the host holds processes, embeddings and buffers."""

BATCHES = (4, 8, 16, 32, 64)
"""Sequences per GPU that the published figures are the best of."""

CHUNK_NUMELS = tuple(mebi << 20 for mebi in range(32, 385, 8))
"""Elements per chunk to choose from: its scripts search in steps of 32 Mi from 64 Mi, and use up to 384 Mi."""

OPTIMIZER_BYTES = 3 * SINGLE
"""Per parameter: master, momentum, variance."""

ADAM_BYTES = HALF + 2 * OPTIMIZER_BYTES
COPY_BYTES, CAST_BYTES = 2 * HALF, SINGLE + HALF
"""What the CPU reads and writes per parameter: its Adam; the copy of a gradient that lies on the host into a buffer;
the cast back where the parameter lies on the host."""

DEVICE_ADAM_BYTES = 102
"""What its update on the GPU reads and writes per parameter, one PyTorch operator after the other
(`torch_adam_update`: a cast, a division, ten operators on fp32, and the cast back)."""

FORWARD_SCORES, BACKWARD_SCORES = 10.5, 11.5
FORWARD_HIDDEN, BACKWARD_HIDDEN = 31, 48
"""How often operators that are no matrix product, and attention's products, read or write all scores, and all hidden
units, of a layer: counted over the model that was measured, Hugging Face's BERT, whose attention is not fused. Scores:
product, scaling, mask, softmax, dropout. Hidden: permuting, dropout, sums, norms, GELU, and the biases' gradients."""

GRADIENT_BYTES_PER_HIDDEN = 16
"""Per token and hidden unit: the gradients around the GELU, four times as wide, two of them, in 16 bits."""


@dataclass(frozen=True)
class Lanes:
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
class OriginalStep:
    """One step: `batch` sequences per GPU, 10^12 operations per second of all GPUs as the paper counts them.

    optimizer_on_device: how many of a process's `chunks` have their optimizer states on its GPU.
    """

    batch: int
    chunk_numel: int
    chunks: int
    optimizer_on_device: int
    lanes: Lanes
    tflops: float


@dataclass(frozen=True)
class _Tide:
    """Chunks of `param16` that one process moves in a step, the fewest it holds, and those it ends with."""

    fetched: int
    evicted: int
    fewest: int
    held: frozenset[int]


def best_step(gpt: Gpt, machine: Machine, gpus: int) -> OriginalStep:
    """The fastest step over all batches and chunk sizes that fit. Raises BudgetError if none does."""
    assert machine.gpu is not None, f"{machine.name} has no GPU"
    chunk_numel = search_chunk_numel(gpt, machine.gpu, gpus)
    steps, refusals = [], []
    for batch in BATCHES:
        try:
            steps.append(simulate_original(gpt, machine, gpus, batch, chunk_numel))
        except BudgetError as error:
            refusals.append(error)
    if not steps:
        raise min(refusals, key=lambda error: error.short_bytes or 0)
    return max(steps, key=lambda step: step.tflops)


def simulate_original(gpt: Gpt, machine: Machine, gpus: int, batch: int, chunk_numel: int) -> OriginalStep:
    """A step with `batch` sequences on each of `gpus` GPUs of the machine, and chunks of `chunk_numel` elements.

    Raises BudgetError if it doesn't fit, with the bytes that are missing.
    """
    gpu, links = machine.gpu, machine.links
    assert gpu is not None and links is not None, f"{machine.name} has no GPU"
    chunks = -(-chunk_count(gpt, chunk_numel) // gpus)
    device_bytes = gpu.memory * DEVICE_PERCENT // 100
    host_bytes = machine.host.memory * HOST_PERCENT // 100 // gpus
    group_bytes = gpus * chunk_numel * HALF
    if gpus > 1:
        _require(device_bytes * WARM_UP_PERCENT // 100 - group_bytes, "a GPU's warm-up, for a group of chunks")
    rooms = [device_bytes - nbytes - (group_bytes if gpus > 1 else 0) for nbytes in non_model_bytes(gpt, batch, chunks)]
    optimizer_bytes = chunk_numel * OPTIMIZER_BYTES
    margin_bytes = min(rooms) - chunks * chunk_numel * HALF
    on_device = min(chunks, max(0, margin_bytes * MARGIN_PERCENT // 100 // optimizer_bytes))
    forced = 0
    while True:
        taken = (on_device + forced) * optimizer_bytes
        free = [(room - taken) // (chunk_numel * HALF) for room in rooms]
        _require((min(free) - 1) * chunk_numel * HALF, "each GPU")
        tide = _move(free, chunks)
        below = (chunks - on_device - forced) * optimizer_bytes + (chunks - tide.fewest) * chunk_numel * HALF
        if below <= host_bytes:
            break
        forced += 1
    return _timed(gpt, machine, gpus, batch, chunk_numel, chunks, on_device, forced, tide)


def _require(spare_bytes: int, where: str) -> None:
    if spare_bytes < 0:
        raise BudgetError(f"{format_size(-spare_bytes)} too little memory on {where}", -spare_bytes)


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
    """The chunk size that wastes least, groups filled up, of those with which the warm-up can hold a group."""
    limit = gpu.memory * DEVICE_PERCENT // 100 * WARM_UP_PERCENT // 100 // (gpus * HALF)
    sizes = [numel for numel in CHUNK_NUMELS if max(gpt.layer_tensors()) <= numel <= limit]
    if not sizes:
        raise BudgetError("no chunk")
    return min(sizes, key=lambda numel: numel * -(-chunk_count(gpt, numel) // gpus))


def non_model_bytes(gpt: Gpt, batch: int, chunks: int) -> list[int]:
    """Non-model data on a GPU while each chunk is used: forward in order, then backward in reverse.

    The tide: checkpoints grow in forward, and shrink in backward, beside what one layer saves and its gradients.
    """
    units = batch * gpt.sequence * gpt.hidden
    gradients = GRADIENT_BYTES_PER_HIDDEN * units
    forward = max(gradients, 2 * HALF * gpt.score_numel(batch))
    backward = gpt.saved_bytes(batch) + gradients
    kept = [gpt.checkpoint_bytes(batch, -(-gpt.layers * (index + 1) // chunks)) for index in range(chunks)]
    rising = [nbytes + forward for nbytes in kept]
    falling = [nbytes + backward for nbytes in reversed(kept)]
    falling[0] = max(falling[0], kept[-1] + gpt.logit_bytes(batch))
    return rising + falling


def _move(room: Sequence[int], chunks: int) -> _Tide:
    """The second of two iterations: each chunk once forward and once backward, with room for so many at each access.

    What is used latest leaves first, and is written whether it changed or not: there are no clean copies.
    """
    order = [*range(chunks), *reversed(range(chunks))]
    held: set[int] = set()
    fetched = evicted = 0
    fewest = chunks
    for _ in range(2):
        fetched, evicted, fewest = 0, 0, chunks
        for now, chunk in enumerate(order):
            if chunk not in held:
                held.add(chunk)
                fetched += 1
            while len(held) > room[now]:
                held.remove(max(held - {chunk}, key=lambda other: _next_use(other, now, chunks)))
                evicted += 1
            fewest = min(fewest, len(held))
    return _Tide(fetched, evicted, fewest, frozenset(held))


def _next_use(chunk: int, now: int, chunks: int) -> int:
    forward, backward = chunk, 2 * chunks - 1 - chunk
    if now < forward:
        return forward
    return backward if now < backward else 2 * chunks + forward


def _timed(
    gpt: Gpt, machine: Machine, gpus: int, batch: int, numel: int, chunks: int, on_device: int, forced: int, tide: _Tide
) -> OriginalStep:
    gpu, links, host = machine.gpu, machine.links, machine.host
    assert gpu is not None and links is not None
    tokens = batch * gpt.sequence
    param16, swapped = numel * HALF, forced * numel * OPTIMIZER_BYTES
    # Gradients that lie on a GPU go down to their update, and parameters come back in 32 bits, to be cast there.
    updated = len([chunk for chunk in tide.held if chunk >= on_device])
    looked_up = tokens * gpt.hidden * SINGLE
    h2d = tide.fetched * param16 + updated * numel * SINGLE + swapped + looked_up
    d2h = tide.evicted * param16 + updated * param16 + swapped + looked_up
    sent = 3 * (gpus - 1) * chunks * param16
    lanes = Lanes(
        compute_s=compute_seconds(gpt, gpu, batch),
        h2d_s=h2d / links.of_one(links.h2d, gpus),
        d2h_s=d2h / links.of_one(links.d2h, gpus),
        collectives_s=sent / links.gpu_gpu if links.gpu_gpu and gpus > 1 else 0.0,
        update_s=on_device * numel * DEVICE_ADAM_BYTES / gpu.memory_bandwidth
        + _host_seconds(gpt, host, gpus, (chunks - on_device) * numel, (chunks - on_device - updated) * numel),
    )
    tflops = gpus * gpt.paper_operations(tokens) / lanes.total_s / 1e12
    return OriginalStep(batch, numel, chunks, on_device, lanes, tflops)


def compute_seconds(gpt: Gpt, gpu: Gpu, batch: int) -> float:
    """What forward, recomputation and backward compute for: products at the rate of their size, the rest at the
    memory's."""
    tokens = batch * gpt.sequence
    products = gpt.operations(tokens) / gpu.matmul_rate(gpt.hidden)
    scores = (2 * FORWARD_SCORES + BACKWARD_SCORES) * gpt.score_numel(batch)
    hidden = (2 * FORWARD_HIDDEN + BACKWARD_HIDDEN) * tokens * gpt.hidden
    return products + gpt.layers * (scores + hidden) * HALF / gpu.memory_bandwidth


def _host_seconds(gpt: Gpt, host: Host, gpus: int, updated: int, lying: int) -> float:
    """The CPU's update: of `updated` parameters per process, of which `lying` have their gradient on the host.

    Each process has the whole embedding, in 32 bits, whose gradients are summed through the host's memory. It runs
    one thread per core that it has to itself: cores left over by the division are idle.
    """
    embedding = gpt.embedding_numel * (SINGLE + 2 * OPTIMIZER_BYTES)
    summed = 4 * gpt.embedding_numel * SINGLE if gpus > 1 else 0
    nbytes = updated * ADAM_BYTES + lying * (COPY_BYTES + CAST_BYTES) + embedding + summed
    return gpus * nbytes / host.update_bandwidth(gpus, max(1, host.cores // gpus))
