"""Search for the fastest estimate of a model on a machine, over batches and shares of recomputed layers."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from patrickstar._models.presets import Preset
from patrickstar._perf_model.machine_spec import Machine
from patrickstar._perf_model.margins import NO_BUDGET_GIVEN, Margins
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.perf_model import MOST, Estimate, best_estimate, largest_batch, with_smallest_replicas
from patrickstar._perf_model.text_tables import format_seconds
from patrickstar._perf_model.workload import offloading, on_lines, splitting
from patrickstar._plan.plan import Plan
from patrickstar._plan.planned_model import PlannedModel, planned_shape
from patrickstar._plan.upgrades import upgrades
from patrickstar.errors import BudgetError

if TYPE_CHECKING:
    from patrickstar._dry_run.report import DryRunReport
    from patrickstar._plan.traced_model import TracedModel

_log = logging.getLogger(__name__)

SHARES = (0.5, 0.75)
"""Shares of layers recomputed in whole of which the first one that fits is tried: each takes a dry run."""
OFFLOADED = 0.4
"""Share of the activations whose offload is tried beside a GPU, with half as many layers recomputed in whole."""


GPT_FAMILY = (
    (2048, (20, 40)),
    (2304, (64,)),
    (3072, (53, 72)),
    (4096, (50, 60, 78, 90, 110, 130)),
    (8192, range(40, 241, 10)),
)
"""Hidden sizes and numbers of layers of increasingly large GPTs: those of the paper, then wider ones."""


@dataclass(frozen=True)
class Search:
    """Machine and choices among which the fastest is sought.

    Attributes:
        mesh: Processes, with the smallest replicas that are considered.
        checkpointing: Shares of the layers that are recomputed.
        batches: Sequences per process.
        dry_run: Let the engine run a step of what was found on the simulated machine.
        margins: Memory of the machine that budgets leave to others.
        say: Called with a text at the beginning of each stage, which may take seconds.
        tell: Called with what is known before the plan is.
    """

    machine: Machine
    mesh: Mesh
    checkpointing: Sequence[float]
    batches: Sequence[int]
    dry_run: bool
    margins: Margins = NO_BUDGET_GIVEN
    say: Callable[[str], None] = _log.info
    tell: Callable[[str], None] = _log.info

    def plan(self, model: PlannedModel) -> Plan:
        """Return the plan of a model. Raise BudgetError if it does not fit, with batches that do."""
        self.say(f"estimating steps of {model.name} on {self.machine.name}")
        mesh = self._with_replicas(model)
        try:
            best, simulated = self._verified(model, mesh)
        except BudgetError as error:
            left = "".join(f"; {text}" for text in self._margins(self.machine, mesh))
            raise BudgetError(f"{error}{self._smaller_batch(model, mesh)}{left}", error.short_bytes) from None
        one_node = Mesh(1, mesh.gpus, mesh.tp, min(mesh.ep, mesh.gpus))
        shares = sorted({*self.checkpointing, best.workload.checkpointing}, reverse=True)
        best_or_none = replace(self, checkpointing=shares).best_or_none
        of_model = partial(best_or_none, model)
        of_split = partial(best_or_none, replace(model, workload=splitting(model.workload)))
        self.say("estimating what more memory and a drive would bring")
        return Plan(
            model,
            self.machine,
            self.budgets(self.machine, mesh),
            self._margins(self.machine, mesh),
            best,
            simulated,
            self._largest_batch(model, mesh, best.workload.checkpointing),
            None if mesh.processes == 1 else of_model(self.machine, Mesh()),
            None if mesh.nodes == 1 else of_model(self.machine, one_node),
            # Of many nodes each estimate takes a second.
            upgrades(self.machine, mesh, of_model, of_split) if mesh.nodes == 1 else [],
            of_model,
        )

    def budgets(self, machine: Machine, mesh: Mesh) -> Machine:
        """Return a machine with the memory that budgets take of its own."""
        return self.margins.budgets(machine, mesh.gpus, mesh.processes > 1)

    def _margins(self, machine: Machine, mesh: Mesh) -> list[str]:
        return self.margins.described(machine, mesh.gpus, mesh.processes > 1)

    def best(self, model: PlannedModel, machine: Machine, mesh: Mesh, below_bytes: float = math.inf) -> Estimate:
        """Return the fastest estimate with less device memory than this. Raise BudgetError if none fits."""
        choices = self.checkpointing, self.batches, below_bytes
        return best_estimate(model.workload, self.budgets(machine, mesh), mesh, *choices)

    def best_or_none(self, model: PlannedModel, machine: Machine, mesh: Mesh) -> Estimate | None:
        """Return the fastest estimate; None if the model does not fit."""
        try:
            return self.best(model, machine, mesh)
        except BudgetError:
            return None

    def largest(self, sequence: int, capacity_factor: float | None, least_tflops: float) -> PlannedModel:
        """Return the largest GPT of the family that fits and reaches a speed per process.

        Raises:
            BudgetError: None does.
        """
        found: tuple[int, PlannedModel] | None = None
        for hidden, depths in GPT_FAMILY:
            for layers in depths:
                gpt = Preset(layers, hidden, heads=16, sequence=sequence)
                model = planned_shape("a dense GPT like GPT-2", gpt, capacity_factor)
                best = self.best_or_none(model, self.machine, self._with_replicas(model))
                if best is not None and best.tflops >= least_tflops and (found is None or gpt.numel > found[0]):
                    found = gpt.numel, model
        if found is None:
            raise BudgetError(f"no GPT of the family fits {self.machine.name} at {least_tflops:g} TFLOPS per GPU")
        return found[1]

    def _verified(self, model: PlannedModel, mesh: Mesh) -> "tuple[Estimate, DryRunReport | None]":
        """Return the fastest estimate whose step the engine can run, and its dry run.

        Estimates, which divide memory at will and not in chunks, know too little of a device that activations fill. So
        the fastest estimate of those that recompute all layers is tried, too, which may have a larger batch. If the
        fastest step recomputes layers, so is a share of them in whole, and then a smaller one with offload.
        """
        best = self.best(model, self.machine, mesh)
        # Collectives inside of operators are not simulated; of many nodes a dry run would take minutes.
        if not self.dry_run or model.traced is None or mesh.nodes > 1 or mesh.lockstep:
            return best, None
        self.tell(
            f"estimate: a step of {best.workload.batch} x {model.sequence:,} tokens takes about "
            f"{format_seconds(best.seconds)}, because of {best.busiest.name}. The engine runs it, simulated ..."
        )
        self.say("the engine runs the step on the simulated machine")
        traced = model.traced()
        found = self._dry_run(model, mesh, traced, best)
        if len(self.checkpointing) == 1:
            return found
        if found[0].workload.checkpointing < 1 and 1.0 in self.checkpointing:
            other = self._tried(model, mesh, traced, found, 1.0, self.batches)
            found = found if other is None else min(found, other, key=_seconds_per_token)
        if not found[0].workload.checkpointing:
            return found
        batches = (found[0].workload.batch,)
        for share in SHARES:
            if (other := self._tried(model, mesh, traced, found, share, batches)) is not None:
                found = min(found, other, key=_seconds_per_token)
                break
        share = found[0].workload.checkpointing
        if self.machine.gpu is None or share not in SHARES:
            return found
        of_host = replace(model, workload=offloading(model.workload, OFFLOADED))
        other = self._tried(of_host, mesh, traced, found, share / 2, batches)
        return found if other is None else min(found, other, key=_seconds_per_token)

    def _tried(
        self,
        model: PlannedModel,
        mesh: Mesh,
        traced: "TracedModel",
        found: "tuple[Estimate, DryRunReport]",
        share: float,
        batches: Sequence[int],
    ) -> "tuple[Estimate, DryRunReport] | None":
        """Return the fastest of some batches with another share of recomputed layers, and its dry run.

        None if none fits, or it can't be faster.
        """
        smaller = replace(self, checkpointing=(share,), batches=batches)
        try:
            best = smaller.best(model, self.machine, mesh)
            if best.bound_s / best.workload.tokens >= _seconds_per_token(found):
                return None
            return smaller._dry_run(model, mesh, traced, best)
        except BudgetError:
            return None

    def _dry_run(
        self, model: PlannedModel, mesh: Mesh, traced: "TracedModel", best: Estimate
    ) -> "tuple[Estimate, DryRunReport]":
        """Return an estimate with its dry run; one that fits the estimate alone is replaced by a smaller one."""
        while True:
            try:
                return best, traced.dry_run(self.budgets(self.machine, mesh), best)
            except BudgetError as error:
                try:
                    best = self.best(model, self.machine, mesh, best.workload.device_bytes)
                except BudgetError:
                    raise error from None

    def _largest_batch(self, model: PlannedModel, mesh: Mesh, share: float, below: int = MOST) -> int:
        return largest_batch(on_lines(model.workload), self.budgets(self.machine, mesh), mesh, share, below)

    def _with_replicas(self, model: PlannedModel) -> Mesh:
        machine = self.budgets(self.machine, self.mesh)
        return with_smallest_replicas(model.workload, machine, self.mesh, self.checkpointing, min(self.batches))

    def _smaller_batch(self, model: PlannedModel, mesh: Mesh) -> str:
        """Return a hint with the batches that fit, and the passes in which they accumulate; empty if there are none."""
        batch, hints, largest = min(self.batches), [], 1
        # A batch that does not fit may fit with activation checkpointing.
        for share in sorted({min(self.checkpointing), max(model.shares)}):
            limit = batch if share in self.checkpointing else batch + 1
            max_batch = self._largest_batch(model, mesh, share, limit)
            if max_batch:
                largest = max(largest, max_batch)
                hints.append(f"--batch {max_batch}" + (" --activation-checkpointing" if share else ""))
        if not hints:
            return ""
        rows = max(rows for rows in range(1, largest + 1) if batch % rows == 0)
        passes = f"; {batch // rows} passes of {rows} accumulate as many sequences per step" if rows < batch else ""
        return f"; {' or '.join(hints)} fits{passes}"


def _seconds_per_token(found: "tuple[Estimate, DryRunReport]") -> float:
    best, report = found
    return report.seconds / best.workload.tokens
