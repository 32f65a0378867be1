"""Gradients of the next step: clipping and overflow detection over all of them, reading and writing one."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from patrickstar._hardware.sigint_gate import interruption_point
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.grad_norm import GradStats, grad_stats_of_parts
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.precision import LossScaler, clip_coefficient
from patrickstar._params.several_processes import Sharing
from patrickstar._schedule.coordination import Request
from patrickstar.errors import TrainingError

# [Note: gradients that are zero]
# In PyTorch `zero_grad(set_to_none=False)` keeps the gradients that a step has used, as zeros, and the next step
# updates a parameter that gets no other: weight decay and momentum go on. Here such a gradient takes no memory. It is
# written over its parameter when a step begins without another one, or when it is read.


class Gradients:
    """Gradients of the next optimizer step, scaled as the update will read them."""

    def __init__(self, sharing: Sharing, scaler: LossScaler, kernels: Kernels, *, late: bool) -> None:
        self.shards, self.sharing = sharing.shards, sharing
        self.late = late
        """True if updates may be delayed or lock-free."""
        self.scaler = scaler
        self.kernels = kernels
        self._clips: list[float] = []
        self.last_clips: tuple[float, ...] = ()
        """Factors by which the last step's gradients were clipped."""
        self._grad_stats: GradStats | None = None
        self.unscaled: set[ManagedParam] = set()
        """Parameters with gradients of losses that this engine's loss scale did not multiply, though it has one."""
        self._used: set[ManagedParam] = set()
        """Parameters whose gradient exists until `zero_grad()` in PyTorch, though a step has used it here."""
        self.zeros: set[ManagedParam] = set()
        """Parameters whose gradient is zero until a backward adds to it. See [Note: gradients that are zero]."""
        self.writes = 0
        """Number of calls of `write`."""

    @property
    def scales(self) -> tuple[float, ...]:
        """Factors that the update multiplies gradients by, in this order; each product is rounded."""
        average = (1.0 / self.sharing.batches,) if self.sharing.batches > 1 else ()
        unscale = (1.0 / self.scaler.scale,) if self.scaler.enabled else ()
        return (*average, *unscale, *self._clips)

    @property
    def clipped(self) -> bool:
        """True if the gradients were clipped, so that no further gradient may be accumulated."""
        return bool(self._clips)

    def zero(self) -> None:
        """Drop all gradients, and let those that PyTorch would keep be zeros. See [Note: gradients that are zero]."""
        zeros = self._used | {managed for managed in self.shards.managed_params if managed.has_gradient}
        self.drop()
        self._used, self.zeros = zeros, set(zeros)

    def forget(self, managed_params: Collection[ManagedParam]) -> None:
        """Let parameters without a stored gradient have none."""
        self._used.difference_update(managed_params)
        self.zeros.difference_update(managed_params)

    def store_zeros(self, managed: ManagedParam) -> None:
        """Store the gradient of a parameter if it is zero and no backward has added to it.

        Raises:
            TrainingError: Several processes would have to agree, or updates are late.
        """
        if managed not in self.zeros or managed.in_next_step:
            return
        if self.shards.world.size > 1 or self.late:
            raise TrainingError(
                f"zero_grad(set_to_none=False) made the gradient of {managed.name!r} zero, and no backward has added "
                f"to it: a step with such a gradient needs one process, and updates that are not late. Call zero_grad()"
            )
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            zero = torch.zeros((), dtype=managed.chunk.dtype, device=managed.chunk.compute_device)
            self.sharing.accept_gradient(managed, zero.expand(managed.shape))

    def begin_step(self, managed_params: Iterable[ManagedParam]) -> None:
        """Store the gradients of a step that are zero; `managed_params` are those that it updates."""
        for managed in managed_params if self.zeros else ():
            self.store_zeros(managed)
        self.zeros.clear()
        self.last_clips = tuple(self._clips)
        managed_params = self.shards.managed_params
        self._used.update([each for each in managed_params if each.state.overlays_param or each.has_gradient])

    def check_scaled(self) -> None:
        """Raise TrainingError if a gradient is not of this engine's scaled loss, which only `drop` can end."""
        for managed in self.unscaled:
            raise TrainingError(
                f"the gradient of {managed.name!r} is not multiplied by its engine's loss scale, which fp16 needs: it "
                f"comes from loss.backward(), or from another engine's backward that went through this model, as a "
                f"GAN's generator goes through the discriminator. In the first case call engine.backward(loss); in the "
                f"second discard it by this engine's optimizer.zero_grad() before its own backward and step"
            )

    def clip(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Make the step scale gradients to a global norm of at most `max_norm`; return the norm before clipping."""
        self.check_scaled()
        self.sharing.synchronize_gradients(Request.NORM)
        norm = self._norm() if norm_type == 2.0 else self._norm_of_order(norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise TrainingError(
                f"the total norm of order {norm_type} of the gradients is {norm}, so they can't be clipped; to scale "
                f"them all the same leave out error_if_nonfinite=True"
            )
        total, factor = clip_coefficient(norm, max_norm)
        if any(managed.in_next_step for managed in self.shards.managed_params):
            self._clips.append(factor)
        return torch.tensor(total, dtype=torch.float32, device=self.shards.manager.device)

    def _norm(self) -> float:
        with self.sharing.collective_section():
            self._grad_stats = self._compute_stats()
        return self._grad_stats.norm

    def _norm_of_order(self, norm_type: float) -> float:
        """Return the norm of the norms of all gradients, as PyTorch computes it."""
        gradients = (self.read(managed) for managed in self.shards.managed_params)
        norms = [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients if gradient is not None]
        return float(torch.linalg.vector_norm(torch.stack(norms), norm_type)) if norms else 0.0

    def read(self, managed: ManagedParam) -> torch.Tensor | None:
        """Return a copy of a parameter's gradient, unscaled and clipped, in the master's dtype, or None.

        Every process must call this.
        """
        self.check_scaled()
        self.store_zeros(managed)
        self.sharing.synchronize_gradients(Request.STATE)
        if not managed.in_next_step:
            return None
        with torch.no_grad(), self.sharing.collective_section():
            grad = torch.empty(managed.numel, dtype=getattr(torch, managed.schema.master_dtype), device="cpu")
            if managed.has_gradient:
                self._read_shard(managed, grad[managed.shard_slice])
            self.sharing.gather_parts(managed, grad)
            whole = grad.as_strided(managed.region.shape, managed.region.strides)
            if managed.parts:
                whole = managed.assemble(whole, self.shards.world)
            return whole.to(self.shards.manager.device)

    def stored_dtype(self, managed: ManagedParam) -> torch.dtype:
        """Return the dtype that holds a parameter's gradient without loss: the master's if it is a sum or scaled."""
        return managed.full_dtype if self.scales or managed.state.accumulated else managed.chunk.dtype

    def check_final(self, managed: ManagedParam) -> None:
        """Raise TrainingError if gradients were clipped and may not change."""
        if self.clipped:
            raise TrainingError(
                f"the gradient of {managed.name!r} can't be changed after engine.clip_grad_norm_, which has computed "
                f"the norm of all gradients: change it before"
            )

    def write(self, managed: ManagedParam, value: torch.Tensor) -> None:
        """Replace a gradient by `value`, which `read` will return; every process must call it.

        Raises:
            TrainingError: The gradient does not exist, or it was clipped and is final.
        """
        self.check_final(managed)
        if not managed.in_next_step:
            raise TrainingError(f"the gradient of {managed.name!r} can't be changed: it was used or discarded")
        self.writes += 1
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for scale in self.scales:
                value = value / scale
            flat = managed.flattened(managed.local(value))[managed.shard_slice]
            self.shards.write_gradient(managed, flat)

    def _read_shard(self, managed: ManagedParam, grad: torch.Tensor) -> None:
        self.shards.ensure_local(managed)
        if not self.shards.gradient_on_disk(managed):
            grad.copy_(self.shards.gradient(managed).together().scaled(self.scales))
            return
        for elements, part in self.shards.gradient_parts(managed):
            grad[elements] = part.together().scaled(self.scales)

    def overflowed(self) -> bool:
        """Return whether a gradient of the scaled loss has an infinity or a NaN; reuses the statistics of clipping."""
        if not self.scaler.enabled:
            return False
        with self.sharing.collective_section():
            grad_stats = self._grad_stats if self._grad_stats is not None else self._compute_stats()
        return grad_stats.not_finite > 0

    def drop(self) -> None:
        """Drop all gradients, and restore the parameters that they overlay."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self.sharing.discard_gradients()
        self._clips.clear()
        self.unscaled.clear()
        self._grad_stats = None

    def _make_room(self, managed_params: Sequence[ManagedParam]) -> None:
        """Evict parameters, as far as they can be, for the workspace of statistics beside an accelerator."""
        manager = self.shards.manager
        if manager.hardware.has_gpu and managed_params:
            longest = max(managed.location.numel for managed in managed_params)
            nbytes = self.kernels.stats_workspace_bytes(manager.device, longest)
            if nbytes:
                manager.cache.evict_idle(nbytes, [managed.shard_chunk for managed in managed_params])
                self.shards.update_param_views()

    def _compute_stats(self) -> GradStats:
        """Compute the statistics: of all gradients on the device at once, of others chunk by chunk.

        So temporary copies hold at most one chunk's gradients. Nothing moves before those on the device are read.
        """
        sums: dict[ManagedParam, float] = {}
        not_finite, data = 0, self.shards
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            groups = [[managed for managed in group if managed.has_gradient] for group in data.by_chunk.values()]
            at_once: list[ManagedParam] = []
            if self.kernels.has_kernel(data.manager.device):
                at_once = [managed for group in groups for managed in group if data.gradient_on_device(managed)]
            read = set(at_once)
            rest = [[managed for managed in group if managed not in read] for group in groups]
            for group in filter(None, [at_once, *rest]):
                interruption_point()
                for managed in group:
                    data.ensure_local(managed)
                on_disk = [managed for managed in group if data.gradient_on_disk(managed)]
                in_memory = [managed for managed in group if managed not in on_disk]
                self._make_room(in_memory)
                stats = self.kernels.grad_stats(
                    [data.gradient(managed).together() for managed in in_memory], self.scales
                )
                sums.update(zip(in_memory, stats.squares, strict=True))
                not_finite += stats.not_finite
                for managed in on_disk:
                    parts = (part.together().scaled(self.scales) for _, part in data.gradient_parts(managed))
                    stats = grad_stats_of_parts(parts)
                    sums[managed] = stats.squares[0]
                    not_finite += stats.not_finite
        return GradStats(*self._add_squares(sums, not_finite))

    def _add_squares(self, sums: Mapping[ManagedParam, float], not_finite: int) -> tuple[tuple[float, ...], int]:
        """Return the squared gradient sums over all ranks, in creation order, and the count of non-finite elements.

        They are added in fp64, in rank order.
        """
        values = [sums.get(managed, 0.0) if managed.counts else 0.0 for managed in self.shards.managed_params]
        own = torch.tensor([*values, float(not_finite)], dtype=torch.float64, device="cpu")
        rows = self.shards.world.all_gather(own)
        total = torch.zeros_like(rows[0])
        for rank_row in rows:
            total += rank_row
        *squares, non_finite_total = total.tolist()
        with_square = zip(self.shards.managed_params, squares, strict=True)
        return tuple(square for managed, square in with_square if managed.in_next_step), int(non_finite_total)
