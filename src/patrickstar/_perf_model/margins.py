"""Margins: memory that budgets leave to others. One rule for default budgets, plans and tables of plans.

A budget takes the free memory less a reserve, but leaves no more than half of what is free: of a small memory the
reserve would leave nothing.
"""

from dataclasses import dataclass

from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.machine_spec import Machine

GUARD_DIVISOR = 10
"""A tenth of the RAM stays available, as guards expect it: earlyoom ends the largest process of a machine once less is
available (its option -m, 10 % by default)."""
SYSTEM_BYTES = 1_500_000_000
"""RAM that a system uses before training starts, where it can't be measured: a Linux desktop without open programs.
Assumed."""
PROCESS_BYTES = 550_000_000
"""RAM of a process beside its tensors, where it can't be measured: Python, PyTorch, transformers and an engine. On a
CPU 542 MB were measured, of which 15 MB are model data; libraries of a GPU, which take more, were not."""
CONTEXT_BYTES = 1 << 29
"""Device memory that a process takes by its context, where it can't be measured: about 500 MiB with CUDA."""
OUTSIDE_BYTES = 3 << 29
"""Device memory that stays free, 1.5 GiB: kernels loaded on first use, handles of cuBLAS and cuDNN, and Triton's
modules. The allocator counts none of it."""
COLLECTIVE_BYTES = 1 << 30
"""Stays free in addition if several processes train: buffers of NCCL or of another collective library."""


def ram_budget(free_bytes: int, total_bytes: int) -> int:
    """Return the bytes of RAM that all budgets together take, of a machine or a control group of `total_bytes`."""
    return _less(free_bytes, total_bytes // GUARD_DIVISOR)


def device_budget(free_bytes: int, several: bool = False) -> int:
    """Return the budget of a device with this much free memory; `several` if several processes train together."""
    return _less(free_bytes, OUTSIDE_BYTES + (COLLECTIVE_BYTES if several else 0))


def _less(free_bytes: int, reserve_bytes: int) -> int:
    return free_bytes - min(reserve_bytes, free_bytes // 2)


@dataclass(frozen=True)
class Margins:
    """Margins of a machine that is described rather than measured.

    Attributes:
        device, host: False if the machine's description has a budget there, from which nothing is taken off.
    """

    device: bool = True
    host: bool = True

    def budgets(self, machine: Machine, gpus: int = 1, several: bool = False) -> Machine:
        """Return the machine with the memory that budgets take of its own.

        Args:
            machine: The machine, with the memory that it has.
            gpus: Its processes, one per GPU.
            several: Whether more than one process trains, on any number of machines.
        """
        changes: dict[str, object] = {}
        if self.host:
            memory = machine.host.memory
            free_bytes = max(0, memory - SYSTEM_BYTES - gpus * PROCESS_BYTES)
            # A machine has some memory: a budget of nothing is what no model fits.
            changes["host"] = machine.host.model_copy(update={"memory": max(1, ram_budget(free_bytes, memory))})
        if self.device and machine.gpu is not None:
            memory = device_budget(max(0, machine.gpu.memory - CONTEXT_BYTES), several)
            changes["gpu"] = machine.gpu.model_copy(update={"memory": max(1, memory)})
        return machine.model_copy(update=changes)

    def described(self, machine: Machine, gpus: int = 1, several: bool = False) -> list[str]:
        """Return for each memory with a margin how much of it stays free, and for what."""
        budgets, texts = self.budgets(machine, gpus, several), []
        if self.device and machine.gpu is not None and budgets.gpu is not None:
            left = machine.gpu.memory - budgets.gpu.memory
            collectives = ", buffers of collectives" if several else ""
            texts.append(
                f"of {format_size(machine.gpu.memory)} of the device {format_size(left)} stay for its context, "
                f"kernels and libraries{collectives}"
            )
        if self.host:
            memory, left = machine.host.memory, machine.host.memory - budgets.host.memory
            processes = "the process" if gpus == 1 else f"{gpus} processes"
            texts.append(
                f"of {memory / 1e9:,.1f} GB of RAM {left / 1e9:,.1f} GB stay: {SYSTEM_BYTES / 1e9:.1f} GB for the "
                f"system, {gpus * PROCESS_BYTES / 1e9:.2f} GB for {processes}, the rest available, because guards end "
                f"programs once less than a tenth is"
            )
        return texts


NO_BUDGET_GIVEN = Margins()
"""Margins of both memories."""
