"""Log of a run for TensorBoard: scalars of each step, with the values of the log of JSON lines."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from patrickstar._engine.core import EngineCore
from patrickstar._engine.run_log import StepRecord
from patrickstar.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Scalar = Callable[[StepRecord], float | None]
"""Function that returns a value of a step; None if it is not known."""

SCALARS: Mapping[str, Scalar] = {
    "train/loss": lambda record: record.loss,
    "train/learning_rate": lambda record: record.learning_rate,
    "train/gradient_norm": lambda record: record.gradient_norm,
    "train/tokens_per_s": lambda record: record.tokens / record.elapsed_s if record.tokens else None,
    "time/step_s": lambda record: record.elapsed_s,
    "time/stall_s": lambda record: record.stats.stall_s,
    "memory/device_peak_model_bytes": lambda record: record.stats.device_peak_model_bytes,
    "memory/device_peak_non_model_bytes": lambda record: record.stats.device_peak_non_model_bytes,
    "memory/host_peak_model_bytes": lambda record: record.stats.host_peak_model_bytes,
    "memory/host_peak_non_model_bytes": lambda record: record.stats.host_peak_non_model_bytes,
    "transfer/to_device_bytes": lambda record: record.stats.h2d_bytes,
    "transfer/to_host_bytes": lambda record: record.stats.d2h_bytes,
    "transfer/evictions": lambda record: record.stats.evictions,
}
"""Scalars of every run by tag."""
DISK_SCALARS: Mapping[str, Scalar] = {
    "disk/read_bytes": lambda record: record.stats.disk_read_bytes,
    "disk/written_bytes": lambda record: record.stats.disk_write_bytes,
    "disk/stored_bytes": lambda record: record.stats.disk_bytes,
}
"""Scalars of a run with a disk tier."""
COLLECTIVE_SCALARS: Mapping[str, Scalar] = {
    "collectives/gathered_bytes": lambda record: record.stats.gathered_bytes,
    "collectives/reduced_bytes": lambda record: record.stats.reduced_bytes,
}
"""Scalars of a run of several processes."""
STALENESS_SCALARS: Mapping[str, Scalar] = {
    "staleness/mean_updates": lambda record: record.stats.staleness,
    "staleness/peak_updates": lambda record: record.stats.peak_staleness,
}
"""Scalars of a run with delayed or lock-free updates."""


def scalars_of(core: EngineCore) -> Mapping[str, Scalar]:
    """Return the scalars of a run with an engine, by tag: without those that it always has as zero."""
    return {
        **SCALARS,
        **(DISK_SCALARS if core.config.disk is not None else {}),
        **(COLLECTIVE_SCALARS if core.world.size > 1 else {}),
        **(STALENESS_SCALARS if core.config.late_update is not None else {}),
    }


def summary_writer() -> "type[SummaryWriter]":
    """Import TensorBoard, which takes seconds, and return PyTorch's writer of its files.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(f"a log for TensorBoard needs its package ({error}): pip install tensorboard") from error
    return SummaryWriter


class TensorBoardLog:
    """Directory of event files that `tensorboard --logdir` shows.

    The file of this run is created when the first step is written: a run that fails earlier leaves the log unchanged.

    Args:
        directory: Where to write.
        steps: Number of steps of an earlier log in the directory that are continued. TensorBoard hides its later ones.

    Raises:
        ConfigError: TensorBoard is not installed, or the directory cannot be created.
    """

    def __init__(self, directory: str | Path, steps: int = 0) -> None:
        self._directory, self._steps = Path(directory), steps
        self._create = summary_writer()
        self._writer: SummaryWriter | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def write_step(self, record: StepRecord, scalars: Mapping[str, Scalar]) -> None:
        """Write the scalars of a step and flush the file, so that a killed run leaves its steps in the log.

        Args:
            record: Record of the step.
            scalars: Scalars of the run by tag. One whose value is None is left out.

        Raises:
            ConfigError: The file cannot be written.
        """
        try:
            if self._writer is None:
                self._writer = self._create(str(self._directory), purge_step=self._steps + 1)
            for tag, scalar in scalars.items():
                value = scalar(record)
                if value is not None:
                    self._writer.add_scalar(tag, value, record.step)
            self._writer.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the log {self._directory} for TensorBoard can't be written: {error.strerror}; choose another directory"
        )
