"""Wiring of an engine's parts, and the optimizer step that combines them."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from patrickstar._autograd.activation_offload import ActivationOffload
from patrickstar._autograd.interceptor import Interceptor
from patrickstar._autograd.lazy_state import LazyState
from patrickstar._autograd.module_hooks import ModuleHooks, check_no_graphs
from patrickstar._checkpoint.background_save import BackgroundSave
from patrickstar._chunks.chunk_manager import ChunkManager
from patrickstar._chunks.tracer import Tracer
from patrickstar._distributed.process_group import Processes
from patrickstar._distributed.single_process import SINGLE_PROCESS
from patrickstar._engine.construction import Construction, ModelFile
from patrickstar._engine.distributed_init import broadcast_buffers, chunk_comm, negotiate_layout
from patrickstar._engine.distribution import Distribution
from patrickstar._engine.engine_call import engine_call
from patrickstar._engine.frozen_modules import with_frozen
from patrickstar._engine.input_record import InputRecord, shapes_of
from patrickstar._engine.model_structure import ModelStructure
from patrickstar._engine.param_init import (
    WeightSource,
    check_model,
    move_buffers,
    move_params,
    param_specs,
    params_used_together,
    replace_methods,
    unfreeze,
)
from patrickstar._hardware.direct_io import PAGE_BYTES
from patrickstar._hardware.memory_meter import Meter
from patrickstar._hardware.sigint_gate import deferring_sigint, interruptible, managing
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.torch_optim_adapter import import_compiler
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._params.local_shards import LocalShards
from patrickstar._params.managed_param import ManagedParam
from patrickstar._params.model_data import ModelData
from patrickstar._params.one_process import OneProcess
from patrickstar._params.out_of_memory import explain, is_out_of_memory
from patrickstar._params.precision import LossScaler
from patrickstar._params.several_processes import SeveralProcesses
from patrickstar._params.state_dict import ModelState
from patrickstar._params.tensor_subclass import managed_param_of
from patrickstar._schedule.coordination import Request
from patrickstar._schedule.eviction_prefetch import AggressivePrefetch, DemandFetch, PrefetchPolicy
from patrickstar._step.budgets import budgets, plan_tiers
from patrickstar._step.full_state import FullState
from patrickstar._step.gradients import Gradients
from patrickstar._step.optimizer_in_backward import OptimizerInBackward, hyper_parameters
from patrickstar._step.optimizer_placement import OptimizerPlacement
from patrickstar._step.optimizer_step import OptimizerStep
from patrickstar._step.stats import Stats
from patrickstar._tiers.hardware import Hardware
from patrickstar.config import Config
from patrickstar.errors import BudgetError, DiskError, ModelError, MoveError, TrainingError


class EngineCore:
    """Parts of one engine and the operations that involve several of them.

    `Engine` is the public interface; the optimizer and checkpoints use this class. For tests, `evict_everything` evicts
    every evictable chunk at each access, and `poison` fills freed memory with NaN. `page_bytes` is the unit of disk
    transfers; without `speculates` no update begins before its step has decided.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        config: Config,
        weights: WeightSource | None = None,
        *,
        meter: Meter | None = None,
        kernels: Kernels | None = None,
        evict_everything: bool = False,
        poison: bool = False,
        prefetch_policy: type[PrefetchPolicy] | None = None,
        page_bytes: int = PAGE_BYTES,
        speculates: bool = True,
        hardware: Hardware | None = None,
        world: Processes = SINGLE_PROCESS,
        mesh: Any = None,
        frozen: Mapping[str, nn.Module] | None = None,
        explain_refusal: "Callable[[EngineCore, InputRecord, BudgetError], BudgetError] | None" = None,
    ) -> None:
        import_compiler()
        self._explain_refusal = explain_refusal
        self._inputs: InputRecord | None = None
        """Inputs of the last forward of an unconfirmed iteration, to explain its refusal."""
        self.config, self.world = config, world
        hardware = hardware if hardware is not None else Hardware(config.find_device())
        self.device = hardware.device
        hardware.start()
        meter = meter if meter is not None else hardware.meter()
        # Before the budgets are computed: memory that libraries load is no longer free then. A meter that measures
        # nothing measures no workspaces either.
        library_bytes = min(hardware.library_bytes(config.compute_dtype, config.optimizer.may_multiply), meter.now(0))
        local_processes = len(world.local_ranks)
        memory = budgets(config, hardware, local_processes, several=world.size > 1)
        put_off = weights is None and (world.size > 1 or config.disk is not None)
        construction = Construction.of(model, world, put_off)
        self.frozen = dict(frozen or {})
        modules = with_frozen(construction.described, self.frozen)
        check_model(modules, torch.device("meta") if construction.put_off else self.device)
        self.distribution = Distribution.of(world, modules, mesh)
        memory, library_bytes = self.distribution.common_memory(memory, library_bytes)
        self.device_budget_bytes, self.host_budget_bytes = memory
        fragmentation = meter.set_aside(memory[0])
        library_bytes += fragmentation.unplanned_bytes(memory[0])
        mesh, shardings = self.distribution.mesh, self.distribution.shardings
        params = param_specs(modules, construction.described, config, shardings)
        self.layout: Layout = negotiate_layout(world, mesh, modules, params, config, memory[0] - library_bytes)
        param_sets = params_used_together(modules)
        outside = library_bytes, fragmentation
        plan = plan_tiers(config, self.layout, param_sets, memory, hardware, page_bytes, local_processes, *outside)
        # With a GPU the host arena is page-locked as a whole, so its initial size is only what is certain to be used.
        arena_bytes = self.layout.model_data_bytes + plan.staging_bytes
        comm = chunk_comm(world, mesh, hardware.accelerator, self.layout)
        self.manager = ChunkManager(
            self.device,
            *memory,
            poison,
            disk=plan.disk,
            arena_bytes=arena_bytes if hardware.has_gpu else None,
            hardware=hardware,
            comm=comm,
            evict_everything=evict_everything,
        )
        self.manager.device_tier.non_model_bytes, self.manager.device_tier.fragmentation = outside
        policy = prefetch_policy or (None if comm is None else AggressivePrefetch)
        self.tracer = Tracer(self.manager, meter, policy, self.distribution.linked)
        shards = self.shards = LocalShards(self.manager, self.tracer, world)
        self.sharing = OneProcess(shards) if comm is None else SeveralProcesses(shards, comm, config.reduce_dtype)
        self.data = ModelData(self.sharing)
        self.scaler = LossScaler(config.precision == "fp16")
        self.kernels = kernels if kernels is not None else Kernels.best(self.device)
        self.gradients = Gradients(self.sharing, self.scaler, self.kernels, late=config.late_update is not None)
        self.model_state = ModelState(construction.described, self.sharing)
        buffers = plan.staging_size, plan.buffer_bytes
        self.optimizer_step = OptimizerStep(self.shards, config.optimizer, self.kernels, *buffers, config.late_update)
        if (disk := self.optimizer_step.updates.disk) is not None:
            disk.read_ahead.enabled = prefetch_policy is not DemandFetch
        self.full_state = FullState(self.model_state, self.optimizer_step)
        self.optimizer_placement = OptimizerPlacement(self.layout, self.shards, self.optimizer_step, self.tracer)
        always = config.updates_in_backward
        of_backward = speculates, always, self.layout.gradient_room_bytes
        self.optimizer_in_backward = OptimizerInBackward(self.sharing, self.optimizer_step, *of_backward)
        self.background_save = BackgroundSave(self.shards, world)
        intercepted = self.data, self.gradients, self.optimizer_in_backward, self.full_state, self.background_save
        self.interceptor = Interceptor(*intercepted)
        self.close_on_data_loss = self.interceptor.closer.close_on_data_loss
        share = float(config.activation_offload)
        self.activation_offload = ActivationOffload(self.manager, share) if share else None
        ram_bytes = memory[1] if hardware.has_gpu else sum(memory)
        free_bytes = ram_bytes - (self.manager.host_tier.arena_bytes if hardware.has_gpu else 0)
        file = ModelFile.beside(plan.disk, config.disk, local_processes, free_bytes)
        try:
            with construction.built(world, arena_bytes, ram_bytes, file) as self.module:
                self.model_state.module, self.modules = self.module, with_frozen(self.module, self.frozen)
                if construction.put_off:
                    check_model(self.modules, self.device)
                if hardware.accelerator is not None:
                    check_no_graphs(self.modules)
                with managing():
                    moved = self.layout, plan.placement, params, self.data, self.interceptor, weights, shardings
                    move_params(self.modules, *moved)
            if self.optimizer_step.lock_free is not None:
                self.optimizer_step.lock_free.open_log()
        except BaseException:
            self.interceptor.gradient_hooks.close()
            self.model_state.release()
            raise
        if world.size > 1:
            broadcast_buffers(world, self.modules, self.distribution.linked is not None)
        move_buffers(self.modules, self.device)
        self.tracer.calibrate()
        self.optimizer_placement.begin(plan.placement)
        every = self.shards.managed_params
        self.model_params = [each for each in every if each.name.partition(".")[0] not in self.frozen]
        """Parameters of the model, in creation order."""
        self.by_name = {managed.name: managed for managed in self.shards.managed_params}
        self.lazy_state = LazyState(self.interceptor)
        self.module_hooks = ModuleHooks(
            self.interceptor, self.lazy_state.before_state_dict, self.lazy_state.after_state_dict
        )
        self.module_hooks.notice(self.modules)
        replace_methods(self.module, self.module_hooks, self.model_params, config)
        self.interceptor.closer.release_with(self)
        self.averaged = False
        """True while the parameters are exchanged for their moving averages."""
        self._structure: ModelStructure | None = None
        self.stats = Stats(_retries=hardware.allocator_stats().retries)
        self.recording: object = None
        """What records the steps, if they are recorded."""

    @property
    def closed(self) -> bool:
        """True once all chunks are freed."""
        return self.interceptor.closer.closed

    def begin_iteration(self, key: Hashable, inputs: tuple[Any, Any]) -> None:
        """Open an iteration of this kind, unless one is open, before a forward with these args and kwargs."""
        self.data.residency.begin_iteration(key, before_backward=not self.shards.backwards_in_step)
        self._inputs = None
        if self._explain_refusal is not None and self.tracer.unconfirmed:
            self._inputs = InputRecord(inputs)

    def begin_speculation(
        self,
        groups: Callable[[], Mapping[ManagedParam, Mapping[str, Any]]],
        param_groups: Iterable[Mapping[str, Any]],
        promised: bool,
    ) -> None:
        """Let the backward that begins update chunks if the step is likely, or `promised`, to decide as assumed."""
        speculation = self.optimizer_in_backward.speculation
        if speculation.possible and not self.optimizer_step.next_is_late:
            speculation.begin(groups, hyper_parameters(param_groups), self.gradients.scales, promised=promised)

    @engine_call
    def step(self, groups: Mapping[ManagedParam, Mapping[str, Any]], param_groups: Iterable[dict[str, Any]]) -> None:
        """Run one optimizer step with the param group of each parameter."""
        self.check_open()
        self.check_not_averaged("a step")
        self.gradients.check_scaled()
        self.manager.begin_phase("step")
        (self.background_save.wait if self.optimizer_step.together else self.background_save.poll)()
        self.interceptor.hidden_nodes.clear()
        self.data.residency.end()
        self._inputs = None
        self.optimizer_placement.begin_step(self.layout, measured=self.tracer.end_iteration())
        self.data.make_room_for_step()
        self.manager.device_tier.note_non_model_bytes()
        with self.internal_computation():
            self.optimizer_in_backward.finish(groups)
            self.sharing.synchronize_gradients(Request.STEP)
            self.gradients.begin_step(groups)
            overflow = self.gradients.overflowed()
            speculation = self.optimizer_in_backward.speculation
            if speculation.possible:
                speculation.decide(groups.get, hyper_parameters(param_groups), self.gradients.scales, overflow)
            staleness = self.optimizer_step.staleness
            self.optimizer_step.begin_step(groups)
            if overflow:
                self.optimizer_step.skip()
            else:
                self.optimizer_step.run(groups.get, self.gradients.scales)
            self.sharing.close_step(() if overflow else groups, late=self.optimizer_step.is_late)
            self.gradients.drop()
            self.optimizer_step.end_step(() if overflow else param_groups)
            self.data.place_embeddings(self.optimizer_step.tiers.home)
        if self.data.end_step(self.optimizer_in_backward.used_gradients.indices):
            self.optimizer_placement.replan(self.layout)
        self.scaler.update(overflow)
        peak = max(self.tracer.non_model_peak, self.tracer.trace.peak_non_model_bytes)
        self.stats.close_step(self.manager, overflow, self.scaler.scale, peak, staleness)
        self.tracer.non_model_peak = 0

    @engine_call
    def drop_gradients(self, *, to_zeros: bool) -> None:
        """Discard all gradients; `to_zeros`: those that PyTorch would keep are zeros."""
        self.check_open()
        self.optimizer_in_backward.check_inactive("dropping gradients")
        with self.close_on_data_loss():
            self.optimizer_in_backward.speculation.cancel()
            if self.sharing.synchronize_to_drop() and self.gradients.late:
                self.end_delay()
                self.shards.backwards_in_step = 0
            self.optimizer_step.end_step()  # of one that was interrupted
            if to_zeros:
                self.gradients.zero()
            else:
                self.gradients.drop()
                self.gradients.forget(self.shards.managed_params)

    @engine_call
    def flush(self) -> None:
        """End the delay of updates; see `ChunkOptimizer.flush`."""
        self.check_open()
        if self.config.late_update is not None:
            self.data.residency.end()
            self.sharing.synchronize_processes(Request.WRITE)
            self.end_delay()

    def end_delay(self) -> None:
        """Make the newest parameters those that operators read, once all processes have synchronized."""
        with self.internal_computation():
            self.optimizer_step.flush()
            self.sharing.drop_gathered()

    def close(self, keep: bool) -> None:
        """Free all chunks; see `Engine.close`."""
        if not self.closed:
            with deferring_sigint():
                self.background_save.wait()
        self.model_state.keep_values = keep
        if not self.closed and self.world.size > 1 and keep:
            with self.close_on_data_loss():
                self.complete()
                self.sharing.synchronize_processes(Request.CLOSE)
                self.gradients.drop()
                self.model_state.synchronized = True
        lost = self.interceptor.closer.release()
        if lost is None:  # it was closed before
            return
        failed = self.manager.io_dispatch.failed
        damaged = lost or self.optimizer_step.updates.updated_in_part or self.model_state.torn
        if keep and failed is not None and damaged:
            failed.add_note(self.interceptor.closer.losses(lost))
            raise failed

    def complete(self) -> None:
        """Wait for all deferred updates."""
        with self.internal_computation():
            self.optimizer_step.complete()

    def sync_module_changes(self) -> None:
        """Reject parameters replaced since the last call, and give unfrozen ones the chunk lists of trained ones."""
        with torch._C.DisableTorchFunctionSubclass():
            self.interceptor.data_attribute.check(self.interceptor, writes=False)
            if self._structure is not None and self._structure.unchanged:
                return
            self.module_hooks.notice(self.modules)
            unfrozen = []
            for name, param in self.modules.named_parameters():
                managed = managed_param_of(param)
                if managed is None:
                    raise ModelError(
                        f"parameter {name!r} was replaced or added after ps.initialize, and the engine does not manage "
                        f"it; write into the old one under torch.no_grad(), or initialize again"
                    )
                if param.requires_grad and not managed.schema.trained:
                    unfrozen.append(managed)
            if unfrozen:
                self.complete()
                self.flush()
                self.background_save.copy_all()
                if self.tracer.open_key is not None:
                    raise ModelError(
                        f"parameter {unfrozen[0].name!r} was unfrozen in the middle of a step, while autograd graphs "
                        f"that treat it as frozen may exist; unfreeze between optimizer.step() and the next forward"
                    )
                with managing():
                    self.layout = unfreeze(unfrozen, self.layout, self.data, self.interceptor, self.config, self.module)
                self.tracer.invalidate()
            self._structure = ModelStructure(self.modules)

    def signature(self, args: Any, kwargs: Any) -> Hashable:
        """Return the key of the iterations that share a trace: input shapes, dtypes and training mode."""
        return shapes_of(args, kwargs), self.module.training

    @contextmanager
    def internal_computation(self) -> Iterator[None]:
        """Let the engine compute on parameters: autograd records nothing, operators are not intercepted."""
        with self.close_on_data_loss(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            yield

    @contextmanager
    def cleanup_on_error(self) -> Iterator[None]:
        """Unpin chunks and close windows after an exception, so that the engine stays usable."""
        try:
            with self.close_on_data_loss(), self.distribution.explain_lost_process():
                yield
        except (DiskError, MoveError):
            raise
        except BaseException as error:
            self.interceptor.window = None
            self.interceptor.hidden_nodes.clear()
            self.optimizer_in_backward.cancel()
            self.data.release_all()
            self.shards.update_param_views()
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self.data.finish_backward_gradients()
            inputs, self._inputs = self._inputs, None
            self.tracer.discard_iteration()
            if isinstance(error, BudgetError) and inputs is not None and self._explain_refusal is not None:
                with interruptible():
                    raise self._explain_refusal(self, inputs, error) from error
            if is_out_of_memory(error):
                raise explain("an operator", self.shards, error) from error
            raise

    def check_not_averaged(self, operation: str) -> None:
        """Raise TrainingError while the parameters are exchanged for their moving averages."""
        if self.averaged:
            raise TrainingError(
                f"{operation} is not possible inside engine.averaged(), where the parameters are their averages"
            )

    def check_open(self) -> None:
        """Raise TrainingError if the engine is closed or was created by the parent process."""
        if self.closed:
            raise TrainingError("this engine is closed; create a new one with ps.initialize")
        self.interceptor.lock.check_process()
