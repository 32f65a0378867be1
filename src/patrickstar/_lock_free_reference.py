"""Plain-PyTorch reference of lock-free updates, which applies the order of a log."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from patrickstar._kernels.rounding import canonical_nan_
from patrickstar._reference import PlainOptimizer, ReferenceOptimizer, ReferenceTrainer
from patrickstar._step.update_log import LoggedRun, UpdateRecord
from patrickstar.config import LockFree
from patrickstar.errors import ConfigError

Part = tuple[torch.Tensor, slice]
"""Master of a parameter, and elements of it in memory order."""


class LockFreeOptimizer(ReferenceOptimizer):
    """Reference optimizer whose updates follow the log of a run: see docs/staleness.md.

    Raises:
        ConfigError: The configuration names no log to replay, or its optimizer is one of `torch.optim`.
    """

    def __init__(self, trainer: ReferenceTrainer) -> None:
        super().__init__(trainer)
        update = trainer.config.update
        assert isinstance(update, LockFree), "a reference of lock-free updates without the option"
        if update.replay is None:
            raise ConfigError("the reference of lock-free updates repeats those of a log: set LockFree(replay=...)")
        if not isinstance(self.inner, PlainOptimizer):
            raise ConfigError("the reference of lock-free updates takes the optimizers of this package only")
        self.after, self.sums = update.after, update.gradient_dtype
        self.log = LoggedRun(update.replay)
        self.parts = _parts(self.log, trainer)
        self.gradients: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}
        """Steps and gradients that no update has used, for each part."""
        self.counts: dict[tuple[int, int], int] = {}
        """Number of updates of each part while updates are lock-free."""
        self.groups: dict[torch.Tensor, Mapping[str, Any]] = {}
        """Options of the param group of each master as they were when it last had a gradient."""
        self.late: set[torch.Tensor] = set()
        """Masters whose updates are lock-free."""

    def step(self) -> None:
        """Add the gradients to the sums, update the pages that the log names, and round the parameters."""
        trainer = self.trainer
        if self.steps + 1 < self.after:
            super().step()
            return
        self.steps += 1
        trainer.follow_writes()
        trainer.unscale()
        self._apply(record for record in self.log.at(self.steps) if record.last < self.steps)
        gradients = {master: master.grad for master in trainer.masters.values() if master.grad is not None}
        overflow = trainer.scaler.enabled and any(not torch.isfinite(grad).all() for grad in gradients.values())
        if not overflow:
            for master, grad in gradients.items():
                self._add(master, grad)
        self._apply(record for record in self.log.at(self.steps) if record.last == self.steps)
        self._follow_masters([param for param, master in trainer.masters.items() if master in self.late])
        trainer.scaler.update(overflow)
        trainer.drop_gradients()

    def _add(self, master: torch.Tensor, gradient: torch.Tensor) -> None:
        groups = [group for group in self.param_groups if any(master is each for each in group["params"])]
        self.late.add(master)
        if not groups:
            return
        self.groups[master] = {key: copy.deepcopy(value) for key, value in groups[0].items() if key != "params"}
        grad = _flat(torch.empty_like(master).copy_(gradient))
        for key, (owner, elements) in self._parts_of(master):
            self.gradients.setdefault(key, []).append((self.steps, grad[elements].clone()))
            self.counts.setdefault(key, int(self.inner.state[owner].get("step", 0)))

    def _parts_of(self, master: torch.Tensor) -> list[tuple[tuple[int, int], Part]]:
        return [
            ((page, number), part)
            for page, parts in enumerate(self.parts.values())
            for number, part in enumerate(parts)
            if part[0] is master
        ]

    def _apply(self, records: Iterable[UpdateRecord]) -> None:
        pages = {page: number for number, page in enumerate(self.parts)}
        for record in records:
            self._update(pages[record.chunk, record.page], record.last)

    def _update(self, page: int, last: int) -> None:
        """Update the parts of a page with their gradients up to step `last`."""
        for number, (master, elements) in enumerate(list(self.parts.values())[page]):
            due = [grad for step, grad in self.gradients.get((page, number), []) if step <= last]
            if not due:
                continue
            self.gradients[page, number] = self.gradients[page, number][len(due) :]
            self.counts[page, number] += 1
            self._update_part(master, elements, self._sum(due, master), self.counts[page, number])

    def _sum(self, grads: list[torch.Tensor], master: torch.Tensor) -> torch.Tensor:
        dtype = next(param.dtype for param, each in self.trainer.masters.items() if each is master)
        total = grads[0]
        for number, grad in enumerate(grads):
            total = grad if number == 0 else total + grad
            if self.sums == "16-bit":
                total = total.to(dtype).to(master.dtype)
        return total

    @torch.no_grad()
    def _update_part(self, master: torch.Tensor, elements: slice, grad: torch.Tensor, count: int) -> None:
        inner = self.inner
        assert isinstance(inner, PlainOptimizer), "checked at the start"
        rule, state = inner.prepare(master, self.groups[master], count), inner.state[master]
        state["step"] = torch.tensor(float(max(count, int(state.get("step", 0)))), device="cpu")
        values = [_flat(master)[elements], *(_flat(state[kind])[elements] for kind in rule.kinds)]
        rule.apply(values[0], grad.clone(), values[1:])
        for value in values:
            canonical_nan_(value)

    def complete(self) -> None:
        """Use all gradients."""
        for page in range(len(self.parts)):
            self._update(page, self.steps)

    def flush(self) -> None:
        """Use all gradients, and round the parameters."""
        self.complete()
        self._follow_masters([param for param, master in self.trainer.masters.items() if master in self.late])
        self.late.clear()
        self.counts.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the inner optimizer once all gradients have been used."""
        self.complete()
        return super().state_dict()


def _flat(values: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in memory order."""
    return values.as_strided((values.numel(),), (1,))


def _parts(log: LoggedRun, trainer: ReferenceTrainer) -> dict[tuple[int, int], list[Part]]:
    """Return the parts of parameters that each page holds."""
    params = dict(trainer.module.named_parameters())
    parts: dict[tuple[int, int], list[Part]] = {}
    for index, chunk in log.pages.items():
        numel = chunk["page_numel"]
        for name, offset, count, *starts in chunk["params"]:
            for page in range(offset // numel, -(-(offset + count) // numel)) if count else ():
                begin, end = max(offset, page * numel), min(offset + count, (page + 1) * numel)
                part = trainer.master(params[name]), slice(begin - offset + sum(starts), end - offset + sum(starts))
                parts.setdefault((int(index), page), []).append(part)
    return parts
