"""Prediction of how a model trains on a machine: time of a step, its bound, batch, and what would change them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from patrickstar._perf_model.checkpoint_cost import checkpoint_cost
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.perf_model import Estimate
from patrickstar._perf_model.workload import option_of
from patrickstar._plan.frontier import Frontier, frontiers
from patrickstar._plan.planned_model import PlannedModel
from patrickstar._plan.upgrades import BestEstimate, Upgrade, drive_days, lock_free

if TYPE_CHECKING:
    from patrickstar._dry_run.report import DryRunReport


@dataclass(frozen=True)
class Prediction:
    """Batch, speed, memory and limits of a model on a machine, or on a cluster of such machines.

    Attributes:
        model: The model.
        machine: The machine, with the memory that it has.
        budgets: The machine with the memory that budgets take of its own.
        margins: What stays free of each memory, and for what.
        best: Estimate of the fastest batch: the least time that any placement of the model data takes.
        dry_run: Step of that batch as the engine would run it; None if it was left out or is not possible.
        max_batch: Largest batch that fits, in sequences per process.
        one_gpu, one_node: Best estimates of the same model there; None if it does not fit, or is not smaller.
        upgrades: What further parts would bring.
        estimate: Returns the best estimate of the model on another machine and mesh, None if it does not fit.
    """

    model: PlannedModel
    machine: Machine
    budgets: Machine
    margins: Sequence[str]
    best: Estimate
    dry_run: "DryRunReport | None"
    max_batch: int
    one_gpu: Estimate | None
    one_node: Estimate | None
    upgrades: Sequence[Upgrade]
    estimate: BestEstimate

    @property
    def step_s(self) -> float:
        """Seconds of a step: of the dry run or, without one, of the estimate."""
        return self.best.seconds if self.dry_run is None else self.dry_run.seconds

    @property
    def bound_s(self) -> float:
        """Seconds that the busiest resource needs at least, whichever way the model data is placed.

        The estimate's products run at the rate of a typical one, so that a dry run can be faster than its bound.
        """
        return min(self.best.bound_s, self.step_s)

    @property
    def limited_by(self) -> str:
        """Name of that resource."""
        return self.best.busiest.name

    @property
    def batch(self) -> int:
        """Sequences per process and step."""
        return self.best.workload.batch

    @property
    def activation_checkpointing(self) -> float | Literal["products"]:
        """Share of the layers that are recomputed in backward, as in `Config`."""
        return option_of(self.best.workload.checkpointing)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all processes."""
        return self.best.tokens_per_s * self.best.seconds / self.step_s

    @property
    def tflops(self) -> float:
        """Throughput of one process in 10^12 operations per second."""
        return self.best.tflops * self.best.seconds / self.step_s

    @property
    def drive_days(self) -> float | None:
        """Days of training after which a drive has been written as often as it may be; None if none is written."""
        return drive_days(self.machine, self.best, self.step_s)

    @cached_property
    def frontier(self) -> tuple[Frontier, ...]:
        """Estimated tokens per second over the device memory and over the host memory."""
        return frontiers(self.machine, self.best.mesh, self.estimate)

    def efficiency(self, reference: Estimate | None) -> float | None:
        """Return the estimated tokens per second and GPU relative to those of a smaller mesh."""
        if reference is None:
            return None
        return _tokens_per_gpu_s(self.best) / _tokens_per_gpu_s(reference)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, in bytes, seconds and operations; bytes of host and disk are per node."""
        best, machine = self.best, self.machine
        late = lock_free(self.budgets, best)
        checkpoint = checkpoint_cost(best.workload, machine, best.mesh)
        experts = best.workload.experts
        return {
            "model": {"name": self.model.name, "params": best.workload.all_params, "sequence": self.model.sequence},
            "machine": machine.model_dump(),
            "budgets": {
                "device": self.budgets.gpu.memory if self.budgets.gpu is not None else None,
                "host": self.budgets.host.memory,
            },
            "mesh": asdict(best.mesh),
            "processes": best.processes,
            "batch": self.batch,
            "largest_batch": self.max_batch,
            "activation_checkpointing": self.activation_checkpointing,
            "activation_offload": self.best.workload.offloaded,
            "step_s": self.step_s,
            "estimated_step_s": best.seconds,
            "bound_s": self.bound_s,
            "first_step_s": None if self.dry_run is None else self.dry_run.first_step_s,
            "limited_by": self.limited_by,
            "tflops_per_process": self.tflops,
            "tokens_per_s": self.tokens_per_s,
            "efficiency": {"one_gpu": self.efficiency(self.one_gpu), "one_node": self.efficiency(self.one_node)},
            "upgrades": {each.name: None if each.estimate is None else each.gain(best) for each in self.upgrades},
            "drive_days": self.drive_days,
            "free_tokens": best.free_tokens,
            "imbalance": experts.imbalance if experts is not None else None,
            "lock_free": None if late is None else {"step_s": late.seconds, "staleness": late.staleness},
            "checkpoint": None if checkpoint is None else asdict(checkpoint),
            "shares": asdict(best.shares),
            "expert_shares": None if best.expert_shares is None else asdict(best.expert_shares),
            "lanes": [asdict(channel) | {"idle_s": best.seconds - channel.seconds} for channel in best.channels],
            "non_model_bytes": best.workload.non_model_bytes,
            "model_data_bytes": best.model_data_bytes,
            "device_bytes": best.device_bytes,
            "host_bytes": best.host_bytes,
            "disk_bytes": best.disk_bytes,
        }


def _tokens_per_gpu_s(step: Estimate) -> float:
    return step.tokens_per_s / step.mesh.processes
