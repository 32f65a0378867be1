"""Access and release of managed parameters (PatrickStar §6.2, Figure 7)."""

from collections.abc import Collection, Mapping, Sequence

from patrickstar._chunks.garbage import free_garbage
from patrickstar._hardware.profiler_range import profiler_range
from patrickstar._hardware.sigint_gate import deferring_sigint
from patrickstar._layout.schema import GRAD32
from patrickstar._params.managed_param import ManagedParam, check_not_updated
from patrickstar._params.residency import Residency
from patrickstar._params.several_processes import Sharing
from patrickstar._schedule.placement import SMALL_COPY_BYTES, Tier, embedding_runs_on_host
from patrickstar._schedule.tensor_state import TensorState
from patrickstar._tiers.chunk import Chunk
from patrickstar.errors import BudgetError, TrainingError


class ModelData:
    """The managed parameters of one engine, as operators, backwards and steps use them.

    Args:
        sharing: What other processes have to do with their chunks: they share them, or there are none.
    """

    def __init__(self, sharing: Sharing) -> None:
        self.shards, self.sharing = sharing.shards, sharing
        self.manager, self.tracer = self.shards.manager, self.shards.tracer
        self.residency = Residency(self.shards)

    # Access and release (Algorithms 1 and 2)

    def access(self, managed_params: Sequence[ManagedParam], belongs: bool | None, *, gently: bool = False) -> None:
        """Fetch parameters to the device and pin them until `release`. `gently`: evict only `param16` chunks for them.

        `belongs`: its moment is part of the traced iteration or not; None: no moment, nor prefetch, for it begins.
        """
        if self.shards.closed:
            raise TrainingError(f"parameter {managed_params[0].name!r} is used by a graph whose engine is closed")
        shards = self.shards
        if shards.in_backward:
            check_not_updated(managed_params, shards.backward_id)
            for managed in managed_params:
                if managed.schema.gradients_beside and belongs is not None:  # else a suspended window is opened again
                    managed.state.may_grow |= managed.state.is_listed(shards.backward_id)
        displaced = [each for each in managed_params if each.state.overlays_param or each.state.reducing]
        if displaced:
            with_gradients = [managed for managed in displaced if managed.state.overlays_param]
            if with_gradients and self.manager.hardware.has_gpu:
                # The device moves evicted gradients out too: see [Note: lists on the host beside an accelerator].
                self.fetch(self.chunks_to_fetch(with_gradients), gently=gently)
            self.sharing.restore_params(displaced)
        chunks = self.chunks_to_fetch(managed_params)
        if belongs is not None:
            self._begin_moment(tuple([chunk.index for chunk in chunks]), belongs)
        if not (at_rest := self.manager.cache.at_rest(chunks)):
            with profiler_range("access", *managed_params):
                self._fetch_in_budget(chunks, managed_params[0].name, gently)
        self.tracer.transfers_done()
        self.manager.device_tier.note_non_model_bytes()
        self.pin(managed_params)
        if self.residency.active:
            for chunk in [chunk for chunk in chunks if chunk not in self.sharing.written]:
                self.manager.cache.hold(chunk)
        if not at_rest and belongs is not None:
            self.manager.cache.poll_transfers()
        self.shards.update_param_views()

    def _fetch_in_budget(self, chunks: Sequence[Chunk], name: str, gently: bool) -> None:
        """Fetch the chunks of an access; without room, free garbage and try again, unless the caller makes room."""
        for last in (gently, True):
            try:
                return self.fetch(chunks, gently=gently)
            except BudgetError as error:
                error.parameter = name
                if last or not free_garbage(self.tracer, chunks):
                    raise

    def _begin_moment(self, chunks: tuple[int, ...], belongs: bool) -> None:
        self.tracer.begin_moment(chunks, belongs)
        if (timeline := self.manager.timeline) is not None:
            timeline.moment(self.manager.cache.now, chunks)
            timeline.non_model_bytes(self.manager.device_tier.non_model_bytes, settled=False)

    def place_embeddings(self, tier_of: Mapping[int, Tier]) -> None:
        """Switch embeddings to host lookups if the last step transferred more weight bytes than lookup output bytes.

        Each switch invalidates the traces. What is updated on the device is not transferred in later steps.

        Args:
            tier_of: Tiers of optimizer states, by their index.
        """
        for managed in [each for each in self.shards.managed_params if each.embedding]:
            chunk = managed.chunk
            nbytes = chunk.transferred_bytes
            if managed.tied:  # it is fetched for its other operators anyway, and its chunk for other parameters
                alone = len(self.shards.by_chunk[chunk.index]) == 1 and chunk.nbytes >= SMALL_COPY_BYTES
                nbytes = chunk.fetched_bytes - chunk.nbytes if alone else 0
            saves_transfers = embedding_runs_on_host(nbytes, managed.lookup_bytes)
            has_room = chunk.host_bytes > 0 or self.manager.host_tier.has_room(chunk.nbytes)
            if not managed.on_host and saves_transfers and has_room and not self._stays_on_device(chunk, tier_of):
                self.manager.move_to_tier(managed.chunk, Tier.HOST)
                managed.on_host = True
                self.tracer.invalidate()
                self.shards.update_param_views()
                self.shards.set_param_views([managed.chunk])
            chunk.transferred_bytes = chunk.fetched_bytes = managed.lookup_bytes = 0

    def _stays_on_device(self, chunk: Chunk, tier_of: Mapping[int, Tier]) -> bool:
        """Return whether a chunk's states are on the device, or all model data fits beside the non-model data."""
        if self.manager.cache.evict_everything:
            return False
        nbytes = sum(each.nbytes for each in self.manager.chunks.values()) + self.tracer.non_model_peak
        return tier_of.get(chunk.index) is Tier.DEVICE or nbytes <= self.manager.device_tier.budget_bytes

    def move_embedding_to_device(self, managed: ManagedParam) -> None:
        """Disable host lookups of an embedding, as another operator reads its weight; one that is tied has a copy."""
        if managed.tied:
            return
        with deferring_sigint():
            managed.on_host = False
            self.tracer.invalidate()
            self.shards.set_param_views([managed.chunk])

    @staticmethod
    def chunks_to_fetch(managed_params: Sequence[ManagedParam]) -> list[Chunk]:
        """Return the chunks that an access of `managed_params` needs on the device."""
        return list(dict.fromkeys([each.chunk for each in managed_params if not (each.on_host and each.stays_on_host)]))

    def pin(self, managed_params: Sequence[ManagedParam]) -> None:
        """Pin parameters whose chunks are on the device."""
        for managed in managed_params:
            managed.chunk.pins += 1
            managed.state.begin_use()

    def release(self, managed_params: Sequence[ManagedParam], hold: TensorState) -> None:
        """End one use of each parameter; after its last use its state is `hold`, or HOLD_AFTER_BWD with a gradient."""
        for managed in managed_params:
            managed.chunk.pins -= 1
            managed.state.end_use(hold)

    def op_boundary(self, belongs: bool) -> None:
        """Enforce the device budget after an operator."""
        self._begin_moment((), belongs)
        if self.sharing.comm is not None or not self.manager.cache.at_rest(()):
            try:
                self._keep_budget()
                self.manager.cache.poll_transfers()
            finally:
                self.shards.update_param_views()
        self.tracer.transfers_done()

    def _keep_budget(self) -> None:
        """Evict chunks until non-model data fits beside them."""
        if self.sharing.written:
            self.sharing.drop_written()
        try:
            self._make_room()
        except BudgetError:
            if not self.sharing.reduce_idle(()):
                raise
            self._make_room()

    def _make_room(self) -> None:
        try:
            self.manager.cache.make_room(0, protect=())
        except BudgetError:
            if not free_garbage(self.tracer, ()):
                raise
            self.manager.cache.make_room(0, protect=())

    def make_room_for_step(self) -> None:
        """Let chunks fill the budget; evict parameters from an accelerator if more is there than the plan expected."""
        self.manager.device_tier.soft_limit_bytes = self.manager.device_tier.budget_bytes
        if self.manager.hardware.has_gpu:
            self.manager.cache.evict_idle(0, protect=())
            self.shards.update_param_views()

    def finish_forward(self) -> None:
        for managed in self.shards.managed_params:
            managed.state.end_forward()

    def release_all(self) -> None:
        """End all uses after an exception has unwound the operators that started them."""
        self.residency.end()
        for managed in self.shards.managed_params:
            managed.chunk.pins = 0
            managed.state.end_all_uses()
        self.finish_forward()

    def fetch(self, chunks: Sequence[Chunk], *, gently: bool = False) -> None:
        """Fetch chunks to the device, and update the views of all parameters whose chunks moved."""
        try:
            self.manager.cache.fetch(chunks, gently=gently)
        except BudgetError:
            if not self.sharing.reduce_idle(chunks):
                raise
            self.manager.cache.fetch(chunks, gently=gently)
        finally:
            self.shards.update_param_views()

    # Backwards and steps

    def begin_backward(self, accumulate: bool = False) -> None:
        """Start a new backward. `accumulate`: more backwards follow before the step."""
        shards = self.shards
        shards.in_backward, shards.more_backwards = True, accumulate
        shards.lists_gradients |= accumulate
        shards.backward_id += 1
        shards.backwards_in_step += 1

    def finish_backward_gradients(self) -> None:
        """End the backward: store moved-out gradients, which no longer grow, in place of their parameters."""
        self.shards.in_backward = False
        for managed in self.shards.managed_params:
            grad, managed.state.partial = managed.state.partial, None
            if grad is not None:
                self.sharing.accept_gradient(managed, grad)
        self.sharing.finish_backward()

    def end_step(self, used: Collection[int]) -> bool:
        """Drop the gradient list unless the step accumulated; return whether that differs from the previous step.

        Args:
            used: Indices of chunks whose gradients, beside the parameters, stay.
        """
        shards = self.shards
        accumulated, shards.backwards_in_step = shards.backwards_in_step > 1, 0
        shards.lists_gradients |= accumulated
        lists = [chunk for (kind, _), chunk in self.manager.chunks.items() if kind == GRAD32]
        if not accumulated:
            for chunk in lists:
                if shards.by_chunk[chunk.index][0].schema.gradients_beside:
                    if chunk.index not in used:
                        shards.free_gradients(chunk.index)
                elif not any(each.state.update_pending or each.state.late for each in shards.by_chunk[chunk.index]):
                    self.manager.remove(chunk)
        changed, shards.accumulates = accumulated != shards.accumulates, accumulated
        return changed
