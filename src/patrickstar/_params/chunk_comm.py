"""Communication of one engine with other processes: gathers and reductions of chunks, in coordination steps."""

import torch

from patrickstar._distributed.collectives import Levels
from patrickstar._distributed.coordinator import CHUNKS_PER_ENGINE, Coordinator
from patrickstar._distributed.transport import OwnShards
from patrickstar._distributed.transports import Transports
from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._hardware.transfer import CompletedTransfer, Transfer
from patrickstar._layout.schema import ITEMSIZE, NODE16, PARAM16, SHARD16, SUM32
from patrickstar._params.grad_accumulation import GradAccumulation
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._schedule.coordination import Agreement, Request
from patrickstar._schedule.placement import Tier
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import PeerError


class PendingReduction(Transfer):
    """Reduction of a chunk's gradients, which starts once the processes have agreed on it."""

    def __init__(self, comm: "ChunkComm", chunk: Chunk) -> None:
        self.label = f"gradients of {chunk}"
        self.comm = comm
        self.chunk = chunk
        self.collective: Transfer | None = None

    @property
    def started(self) -> bool:
        return self.collective is not None

    @property
    def done(self) -> bool:
        return self.collective is not None and self.collective.done

    def wait(self) -> None:
        while self.collective is None:
            fits = self.comm.fits_host(self.chunk)
            agreement = self.comm.negotiate(Request.MEMORY if fits else Request.MEMORY_ALONE)
            if fits and agreement.blocked and self.collective is None:
                self.comm.move_to_host(self)
        self.collective.wait()

    def prioritize(self) -> None:
        """Do nothing: `wait` negotiates the reduction."""

    def cancel(self) -> None:
        """Withdraw the request, or wait for a reduction that has started."""
        if self.collective is None:
            self.comm.cancel_reduction(self.chunk.index)
        else:
            self.collective.cancel()


class ChunkComm:
    """Communication of one engine with the other processes, which read and write its shards.

    Args:
        levels: Levels of transport in the data-parallel group, if it consists of replicas.
    """

    def __init__(self, coordinator: "Coordinator[ChunkComm]", levels: Levels | None) -> None:
        self.coordinator, self.world = coordinator, coordinator.world
        self.transports = Transports(coordinator.group, coordinator.collectives, levels)
        self.counters = self.transports.counters
        self.pending: dict[int, PendingReduction] = {}
        """Requested reductions that have not started, by chunk index."""
        self._summed: set[int] = set()
        """Chunks with a sum of gradients that is not in place of this rank's shard."""
        self._left = False
        self._gather_target: Chunk | None = None
        self._gathering: Transfer | None = None

    def attach(self, shards: LocalShards, reduce_dtype: str) -> None:
        """Join the coordination steps, in which others request `shards`. `reduce_dtype`: of gradients that are sent."""
        self._shards, self._manager, self._reduces_in_fp32 = shards, shards.manager, reduce_dtype == "fp32"
        self.sums = GradAccumulation(shards.manager)
        """Gradients accumulated on this rank and not yet reduced."""
        self._own = OwnShards(shards.manager.chunks, shards.manager.hardware.has_gpu, self._read, self._ensure_own)
        self.number = self.coordinator.join(self)
        self.world.users += 1

    @property
    def serving(self) -> bool:
        """True while an agreement is executed; no negotiation is possible then."""
        return self.coordinator.serving

    def gather(self, chunk: Chunk) -> Transfer:
        self._gather_target, self._gathering = chunk, None
        chunk.pins += 1  # serving other processes meanwhile must not evict it
        try:
            if self.transports[chunk.index].alone:
                self.start_gather(chunk.index, (self.coordinator.group.rank,), False)
            while self._gathering is None:
                self.negotiate(Request.REFRESH if self.transports[chunk.index].stale else Request.GATHER, chunk.index)
            return self._gathering
        finally:
            chunk.pins -= 1
            self._gather_target = self._gathering = None

    def request_reduction(self, chunk: Chunk) -> Transfer:
        """Request the reduction of a chunk's gradients, once those of the other processes are ready."""
        reduction = self.pending[chunk.index] = PendingReduction(self, chunk)
        if self.transports[chunk.index].alone:
            self.start_reduction(chunk.index, (self.coordinator.group.rank,))
            return reduction
        self.coordinator.ready.add(self._global_index(chunk.index))
        self.negotiate(Request.NOTHING)
        return reduction

    def fits_host(self, chunk: Chunk) -> bool:
        """Return whether a chunk's gradients on the device, which wait for their reduction, can be moved to the host.

        Linked processes move the same chunks, and reduce the same gradients together.
        """
        return self._shards.tracer.linked is None and self.sums.reducing(chunk.index) is None and self.sums.fits(chunk)

    def move_to_host(self, reduction: PendingReduction) -> None:
        """Move gradients that wait for their reduction to the host; the request remains."""
        index = reduction.chunk.index
        self.pending[index] = PendingReduction(self, reduction.chunk)
        self.sums.copy_submitted(reduction.chunk, self.pending[index])
        reduction.collective = CompletedTransfer("gradients on the host")

    def cancel_reduction(self, index: int) -> None:
        """Withdraw the reduction of a chunk's gradients, unless it has started."""
        if (withdrawn := self._unmark_ready(index)) is not None:
            withdrawn.collective = CompletedTransfer("nothing")

    def synchronize_processes(self, request: Request) -> None:
        """Wait until all processes make the same request; the reduction of all ready gradients has started then."""
        while not self.negotiate(request).synchronized:
            pass

    def negotiate(self, request: Request, index: int = -1) -> Agreement:
        if self._left:
            raise PeerError("this engine is being closed and no longer communicates with other processes")
        self.counters.rounds += 1
        agreement = self.coordinator.negotiate(request, self.number, index)
        with self.coordinator.executing():
            for chunk, ranks in agreement.reductions:
                engine, own_index = divmod(chunk, CHUNKS_PER_ENGINE)
                self.coordinator.engines[engine].start_reduction(own_index, ranks)
            for chunk, ranks in agreement.gathers:
                engine, own_index = divmod(chunk, CHUNKS_PER_ENGINE)
                self.coordinator.engines[engine].start_gather(own_index, ranks, chunk in agreement.refreshes)
        return agreement

    def leave(self, reason: str) -> None:
        """Announce the reason, and refuse to communicate from now on."""
        if not self._left:
            self._left = True
            self.world.announce(reason)

    def close(self) -> None:
        """Withdraw pending reductions, and release the process group."""
        for index in list(self.pending):
            self.cancel_reduction(index)
        self.world.users -= 1
        self.world.close()

    def _global_index(self, index: int) -> int:
        return self.number * CHUNKS_PER_ENGINE + index

    def _unmark_ready(self, index: int) -> PendingReduction | None:
        self.coordinator.ready.discard(self._global_index(index))
        return self.pending.pop(index, None)

    # Execution of agreements

    def start_reduction(self, index: int, ranks: tuple[int, ...]) -> None:
        """Start to reduce the gradients of a chunk from these ranks."""
        own, transport = self._unmark_ready(index), self.transports[index]
        whole, target, chunk = self._begin_reduction(index, self.coordinator.group.rank in ranks)
        with profiler_range("reduce-scatter", chunk):
            transfer = transport.reduce(whole, target, ranks)
        chunk.host.reader = transfer
        if own is not None:
            own.collective = transfer

    def start_gather(self, index: int, ranks: tuple[int, ...], refresh: bool) -> None:
        """Start to gather a chunk on these ranks; `refresh`: after an exchange of its shards between replicas."""
        whole = None
        if self.coordinator.group.rank in ranks:
            assert self._gather_target is not None
            whole = self._gather_target.on_device(self._gather_target.whole)
        with profiler_range("all-gather", f"param16[{index}]"):
            if self.transports[index].reads_shard(ranks, refresh):
                self.restore_shard(index, in_memory=False)
            if refresh and (node := self._manager.chunks.get((NODE16, index))) is not None:
                self._manager.transfers.settle(node)  # earlier gathers have read it
            gathering = self.transports[index].gather(self._own, whole, ranks, refresh)
        if whole is not None:
            self._gathering = gathering

    # This rank's shards

    def restore_shard(self, index: int, *, in_memory: bool = True) -> None:
        """Let this rank's shard of a chunk hold the parameters, on its current tier; `in_memory`: not on disk."""
        own = self._manager[SHARD16, index]
        own.complete_update()
        self.finish_reduction(index)
        for managed in self._own_params(index):
            if managed.state.reduced:
                self._shards.list_gradient(managed)
                self._shards.restore_own(managed)
                managed.state.reduced = False
        if in_memory:
            self._ensure_own(own)

    def _ensure_own(self, own: Chunk) -> None:
        if not own.in_memory:
            self._manager.ensure_in_memory(own)
            self._shards.update_param_views()

    def _read(self, own: Chunk, target: torch.Tensor) -> Transfer:
        """Start to read this rank's shard of a chunk from disk into its place in the gathered one."""
        read = self._manager.io_dispatch.read(own, 0, target.view(torch.uint8), urgent=True)
        own.disk.reads = [*(earlier for earlier in own.disk.reads if not earlier.done), read]
        return read

    def sum_of(self, index: int) -> Chunk:
        """Return the chunk that the last reduction of a chunk writes, or has written."""
        return self._manager[SUM32 if index in self._summed else SHARD16, index]

    def finish_reduction(self, index: int) -> None:
        """Finish the pending reduction of a chunk and fold it into grad32."""
        self._manager.transfers.settle(self._manager[SHARD16, index])
        if index in self._summed:
            sum_chunk = self.sum_of(index)
            self._summed.discard(index)
            self._manager.transfers.settle(sum_chunk)
            for managed in self._own_params(index):
                self._shards.add_to_list(managed, sum_chunk)
            if not self._shards.by_chunk[index][0].schema.buffers:
                self._manager.remove(sum_chunk)

    def _begin_reduction(self, index: int, contributes: bool) -> tuple[torch.Tensor | None, torch.Tensor, Chunk]:
        """Return this rank's gradients of a chunk, the buffer for the sum of its shard, and the buffer's chunk.

        The gradients are zero where there are none; None if this rank contributes none.
        """
        self.restore_shard(index, in_memory=False)  # moves an earlier sum out of the buffer
        own, gradients = self._manager[SHARD16, index], None
        if contributes:
            chunk, accumulated = self._manager[PARAM16, index], self.sums.reducing(index)
            gradients = accumulated if accumulated is not None else chunk.on_device(chunk.whole)
        in_fp32 = self._reduces_in_fp32 and own.dtype.itemsize < ITEMSIZE["float32"]
        if in_fp32 or any(managed.state.late for managed in self._own_params(index)):
            self._summed.add(index)
            own = self._sum_chunk(index, own.numel)
        else:
            self._manager.load_shard(own, read=False)
            self._manager.mark_written(own, on_device=own.device.valid)
            for managed in self._own_params(index):
                managed.state.reduced = True
        if contributes and accumulated is None and not own.device.valid:
            self.counters.d2h_bytes += own.nbytes
        return gradients, own.current(own.whole), own

    def _sum_chunk(self, index: int, numel: int) -> Chunk:
        """Return the buffer for the sum of a chunk's shard; on the host, end earlier sums if it has no room."""
        chunk = self._manager.chunks.get((SUM32, index))
        if chunk is not None:
            return chunk
        if self._shards.grad_list_tier(self._shards.by_chunk[index][0]) is Tier.DEVICE:
            return self._manager.new_chunk(SUM32, index, numel, "float32", Tier.DEVICE)
        sums = [earlier for kind, earlier in self._manager.chunks if kind == SUM32]
        while sums and not self._manager.free_host(numel * ITEMSIZE["float32"]):
            self.finish_reduction(sums.pop(0))
        return self._manager.new_chunk(SUM32, index, numel, "float32", Tier.HOST)

    def _own_params(self, index: int) -> list[ManagedParam]:
        return [managed for managed in self._shards.by_chunk[index] if managed.location.numel]
