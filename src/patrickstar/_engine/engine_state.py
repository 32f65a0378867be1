"""State of an engine: state dicts, model folders and checkpoints."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from patrickstar._checkpoint.hf_export import HFExport
from patrickstar._engine.averaging import averaged
from patrickstar._engine.chunk_optimizer import ChunkOptimizer
from patrickstar._engine.core import EngineCore
from patrickstar._schedule.coordination import Request

if TYPE_CHECKING:
    # Imported on first use: torch.distributed.checkpoint would add 0.8 s to `import patrickstar`.
    from patrickstar._engine.engine_checkpoint import EngineCheckpoint


class EngineState:
    """Methods of the engine that read, replace, save and load its state."""

    _core: EngineCore
    optimizer: ChunkOptimizer

    @cached_property
    def _checkpoint(self) -> "EngineCheckpoint":
        from patrickstar._engine.engine_checkpoint import EngineCheckpoint

        return EngineCheckpoint(self._core, self.optimizer)

    def state_dict(self, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Copy parameters and persistent buffers to the host, under the names of `nn.Module.state_dict`.

        Args:
            names: Entries to read. Default: all.

        Returns:
            CPU tensors by name: fp32 masters, frozen parameters in their compute dtype. Tied names share one tensor.

        Raises:
            ModelError: The model has no entry of a given name.
        """
        self._core.check_open()
        self._core.interceptor.data_attribute.check(self._core.interceptor, writes=False)
        with self._core.close_on_data_loss():
            self._core.complete()
            self._core.sharing.synchronize_processes(Request.STATE)
            with self._core.sharing.collective_section():
                return self._core.model_state.state_dict(names)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load parameters and buffers, one after the other, and discard gradients.

        Args:
            state_dict: Tensors by name, as `state_dict` returns them, in any floating-point dtype. DTensors are
                gathered one at a time.
            strict: If False, entries missing in `state_dict` keep their values; unknown names are still refused.

        Raises:
            ModelError: Names or shapes differ. Nothing has been changed.
        """
        self._core.check_open()
        self._core.optimizer_in_backward.check_inactive("loading a state")
        with self._core.close_on_data_loss():
            self._core.complete()
            self._core.flush()
            self._core.background_save.copy_all()
            self._core.sharing.synchronize_processes(Request.STATE)  # from here on no process gathers old values
            self._core.gradients.drop()
            self._core.model_state.load_state_dict(state_dict, strict)

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are their averages, to evaluate or save them.

        It needs the optimizer `EMA` or `ScheduleFreeAdamW`. Parameters and averages are exchanged on entry and on exit,
        one at a time. With several processes all must enter it.

        Returns:
            The context. Inside, steps and checkpoints are refused; `state_dict` and `save_pretrained` give averages.

        Raises:
            ConfigError: The optimizer keeps no average.
            TrainingError: Gradients are stored, or the engine is closed.
        """
        self._core.check_open()
        return averaged(self._core, self.optimizer.managed_groups())

    def save_pretrained(
        self, directory: str | Path, *, dtype: str | None = None, max_shard_bytes: int | str = "5GB"
    ) -> None:
        """Write a model folder that transformers' `from_pretrained` loads: safetensors files and config.json.

        Collective: every process must call it, and rank 0 writes. Tensors are streamed without a second copy of the
        model; the folder appears when it is complete.

        Args:
            directory: New or empty folder.
            dtype: "fp32", "bf16" or "fp16" for all floating-point parameters; in the engine's precision this gives the
                exact bits that operators read. None: full precision, frozen parameters in their compute dtype.
            max_shard_bytes: Largest file, in bytes or as a size such as "5GB"; a larger tensor gets its own file.

        Raises:
            CheckpointError: The folder is not empty, or writing failed. Nothing is left behind; training can continue.
            ConfigError, ModelError: An argument is invalid, or the model cannot be exported.
        """
        self._core.check_open()
        self._core.interceptor.data_attribute.check(self._core.interceptor, writes=False)
        export = HFExport(self._core.model_state, dtype, max_shard_bytes)
        with self._core.internal_computation():
            self._core.complete()
            self._core.sharing.synchronize_processes(Request.STATE)
            with self._core.sharing.collective_section():
                failed = export.write(Path(directory))
        if failed is not None:
            raise failed

    def save(
        self, path: str | Path, state: Mapping[str, Any] | None = None, *, wait: bool = True, frozen: bool = True
    ) -> None:
        """Write a checkpoint from which training resumes with identical bits. Every process must call it.

        The checkpoint contains parameters, optimizer states and param groups in full precision, the loss scale,
        buffers and random generator states.

        Args:
            path: New folder; it appears when the checkpoint is complete.
            state: Further state by name: plain data, or objects with a `state_dict` of plain data (a scheduler).
            wait: If False, write in the background while training continues; a failure is a warning in a later step.
            frozen: If False, leave out frozen parameters; loading then leaves them unchanged.

        Raises:
            CheckpointError: `path` exists, writing failed, or `state` is not plain data; nothing is left behind.
            TrainingError: No step has used the gradients yet, or the engine is closed.
        """
        self._core.check_open()
        self._core.check_not_averaged("a checkpoint")
        with self._core.internal_computation():
            self._checkpoint.start_save(Path(path), state or {}, frozen=frozen)
            if wait:
                self._core.background_save.wait_or_raise()

    def finish_saving(self) -> bool:
        """Wait for the checkpoint that is being written. Return False, with a warning, if it failed, else True."""
        self._core.check_open()
        with self._core.internal_computation():
            return self._core.background_save.wait()

    def load(self, path: str | Path, state: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Load a checkpoint, written on any mesh, with any budgets and precision. Every process must call it.

        Args:
            path: Folder of the checkpoint.
            state: Objects by the names given to `save`; those with a `load_state_dict` are restored.

        Returns:
            The saved `state` as plain data.

        Raises:
            CheckpointError: The checkpoint is damaged or of another model or optimizer. Nothing has been changed.
        """
        self._core.check_open()
        self._core.check_not_averaged("loading a checkpoint")
        with self._core.internal_computation():
            return self._checkpoint.load(Path(path), state or {})
