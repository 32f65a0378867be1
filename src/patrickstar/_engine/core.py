"""The parts of an engine, and what they do together in a step."""

import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from patrickstar._autograd.activation_offload import ActivationOffload
from patrickstar._autograd.interceptor import Interceptor, managing
from patrickstar._autograd.module_hooks import Blocks
from patrickstar._checkpoint.background_save import BackgroundSave
from patrickstar._distributed.process_group import World
from patrickstar._engine.distributed_init import agreed_layout, share_buffers, shared_data
from patrickstar._engine.param_init import (
    WeightSource,
    adopt,
    check_model,
    make_layout,
    param_specs,
    promote,
    used_together,
)
from patrickstar._engine.teardown import release
from patrickstar._kernels.dispatch import Kernels
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._memory.chunk_manager import Manager
from patrickstar._memory.hardware import Hardware
from patrickstar._memory.memory_meter import Meter
from patrickstar._memory.swap_file import PAGE_BYTES
from patrickstar._memory.tracer import Clock
from patrickstar._params.managed_param import Slot
from patrickstar._params.model_data import ModelData
from patrickstar._params.out_of_memory import explain, is_out_of_memory
from patrickstar._params.precision import LossScaler
from patrickstar._params.sharded_model_data import SharedModelData
from patrickstar._params.state_dict import ModelState
from patrickstar._params.tensor_subclass import slot_of
from patrickstar._schedule.coordination import Want
from patrickstar._schedule.prefetch import NextUseAhead, OnDemand, Prefetch
from patrickstar._step.grad_clip import Gradients
from patrickstar._step.optimizer_in_backward import EarlyUpdate
from patrickstar._step.optimizer_placement import Homes
from patrickstar._step.optimizer_step import Update
from patrickstar._step.stats import Stats
from patrickstar._step.tier_planning import budgets, plan_tiers
from patrickstar.config import Config
from patrickstar.errors import DiskError, ModelError, MoveError, TrainingError


class EngineCore:
    """The parts of one engine, wired, and the work that several of them do together.

    `Engine` is what users call; the optimizer and checkpoints work on this.
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
        policy: type[Prefetch] | None = None,
        page_bytes: int = PAGE_BYTES,
        hardware: Hardware | None = None,
        world: World | None = None,
    ) -> None:
        self.config = config
        self.world = world
        hardware = hardware if hardware is not None else Hardware(config.find_device())
        self.device = hardware.device
        hardware.start()
        meter = meter if meter is not None else hardware.meter()
        # Before budgets are made: what libraries load is no longer free then. A meter that counts nothing counts no
        # workspaces either.
        library_bytes = min(hardware.library_bytes(config.compute_dtype), meter.now(0))
        sharing = 1 if world is None else len(world.on_this_host)
        memory = budgets(config, hardware, sharing, several=world is not None)
        self.device_budget_bytes, self.host_budget_bytes = memory
        for_chunks = max(0, self.device_budget_bytes - library_bytes)
        self.module = model if isinstance(model, nn.Module) else model()
        check_model(self.module, self.device)
        params = param_specs(self.module, config)
        if world is None:
            self.layout: Layout = make_layout(params, config, for_chunks)
        else:
            self.layout = agreed_layout(world, self.module, params, config, for_chunks)
        together = used_together(self.module)
        tiers = plan_tiers(config, self.layout, together, memory, hardware, page_bytes, sharing, library_bytes)
        # A GPU's host slab is locked as a whole, so it begins no larger than what is sure to be in it.
        needed = self.layout.model_data_bytes + tiers.staging_bytes
        self.manager = Manager(
            self.device,
            *memory,
            poison,
            disk=tiers.disk,
            slab_bytes=needed if hardware.beside else None,
            hardware=hardware,
        )
        self.manager.evict_everything = evict_everything
        self.manager.compute.non_model_bytes = library_bytes
        self.clock = Clock(self.manager, meter, policy or (NextUseAhead if world is not None else None))
        self.data = ModelData(self.manager, self.clock)
        if world is not None:
            self.data = shared_data(world, self.layout, self.manager, self.clock, config)
        self.scaler = LossScaler(config.precision == "fp16")
        self.kernels = kernels if kernels is not None else Kernels.best(self.device)
        self.gradients = Gradients(self.data, self.scaler, self.kernels)
        self.state = ModelState(self.module, self.data)
        self.update = Update(self.data, config.optimizer, self.kernels, tiers.ring)
        if self.update.pipeline is not None:
            self.update.pipeline.ahead = policy is not OnDemand
        if isinstance(self.data, SharedModelData):
            self.data.complete = self.update.complete
        self.homes = Homes(self.layout, self.data, self.update, self.clock)
        self.early = EarlyUpdate(self.data, self.update)
        self.interceptor = Interceptor(self.data, self.early, self.scaler.enabled)
        self.offload = ActivationOffload(self.manager) if config.activation_offload else None
        try:
            with managing():
                adopt(self.module, self.layout, tiers.placement, params, self.data, self.interceptor, weights)
        except BaseException:
            self.interceptor.close()
            self.state.release()
            raise
        if world is not None:
            share_buffers(world, self.module)
        self._move_buffers()
        self.clock.calibrate()
        self.homes.begin(tiers.placement)
        self.by_name = {slot.name: slot for slot in self.data.slots}
        self.blocks = Blocks(self.interceptor)
        self.blocks.notice(self.module)
        self.release = weakref.finalize(self, release, self.interceptor, self.blocks, self.state)
        self.release.atexit = False
        self.interceptor.release = self.release
        self.stats = Stats(_retries=hardware.allocator_stats().retries)
        self.background_save = BackgroundSave(self.data, world)

    def step(self, groups: Mapping[Slot, Mapping[str, Any]]) -> None:
        self.check_open()
        self.background_save.poll()
        self.interceptor.abandon()
        if self.clock.end_iteration():
            self.homes.follow_traces(self.layout)
        manager = self.manager
        manager.compute.comfort_bytes = manager.compute.budget_bytes
        with self.at_work():
            self.early.finish(groups)
            self.data.meet_gradients(Want.STEP)
            overflow = self.gradients.overflowed()
            if not overflow:
                self.update.run(groups.get, self.gradients.scales)
            self.data.close_step(() if overflow else groups)
            self.gradients.drop()
            self.data.settle_embeddings()
        if self.data.end_step():
            self.homes.follow_traces(self.layout)
        self.scaler.update(overflow)
        peak = max(self.clock.non_model_peak, self.clock.trace.peak_non_model_bytes)
        self.stats.close_step(manager, overflow, self.scaler.scale, peak)
        self.clock.non_model_peak = 0

    def drop_gradients(self) -> None:
        self.check_open()
        self.early.check("dropping gradients")
        with self.stopping_on_loss():
            self.data.meet_to_drop()
            self.gradients.drop()

    def complete(self) -> None:
        """What a step has begun is done."""
        with self.at_work():
            self.update.complete()

    def notice_changes(self) -> None:
        """Parameters replaced since the last call are refused; those no longer frozen get the lists of trained ones."""
        self.blocks.notice(self.module)
        with torch._C.DisableTorchFunctionSubclass():
            thawed = []
            for name, param in self.module.named_parameters():
                slot = slot_of(param)
                if slot is None:
                    raise ModelError(
                        f"parameter {name!r} was replaced or added after ps.initialize, so the engine does not hold "
                        f"it; write into the old one under torch.no_grad(), or initialize again"
                    )
                if param.requires_grad and not slot.scheme.trained:
                    thawed.append(slot)
            if thawed:
                self.complete()
                self.background_save.copy_all()
                if self.clock.open_key is not None:
                    raise ModelError(
                        f"parameter {thawed[0].name!r} was unfrozen in the middle of a step, when graphs that know it "
                        f"frozen may be alive; unfreeze between optimizer.step() and the next forward"
                    )
                with managing():
                    states = self.config.optimizer.states
                    self.layout = promote(thawed, self.layout, self.data, self.interceptor, states)
                self.clock.forget()

    def signature(self, args: Any, kwargs: Any) -> Hashable:
        leaves = pytree.tree_leaves((args, kwargs))
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
        return shapes, self.module.training

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While the engine computes on parameters by itself: nothing is recorded or intercepted."""
        with self.stopping_on_loss(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            yield

    @contextmanager
    def stopping_on_loss(self) -> Iterator[None]:
        """When a disk or a thread has failed, and bytes of chunks are lost, give all back and close the engine."""
        grad = torch.is_grad_enabled()
        try:
            yield
        except (DiskError, MoveError) as error:
            self.interceptor.stop(error)
            raise
        except KeyboardInterrupt:
            torch.set_grad_enabled(grad)  # it may have struck a `no_grad` while that ended
            raise

    @contextmanager
    def unwound_on_error(self) -> Iterator[None]:
        """After an exception nothing is pinned and no window is open; the engine goes on."""
        try:
            with self.stopping_on_loss():
                yield
        except (DiskError, MoveError):
            raise
        except BaseException as error:
            self.interceptor.window = None
            self.interceptor.unseen.clear()
            self.early.abandon()
            self.data.drop_uses()
            self.data.follow_moves()
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self.data.finish_gradients()
            self.clock.abandon()
            if is_out_of_memory(error):
                raise explain("an operator", self.data, error) from error
            raise

    def _move_buffers(self) -> None:
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)

    def check_open(self) -> None:
        if not self.release.alive:
            raise TrainingError("this engine was closed; call ps.initialize for a new one")
        if os.getpid() != self.state.process:
            raise TrainingError(
                f"this engine's chunks are in the memory of process {self.state.process}, which its child "
                f"{os.getpid()}, made by fork(), does not have: use the engine in the process that made it, and give "
                f"the child copies of what it needs (engine.state_dict())"
            )
