"""Part that the strategies of Lightning's Trainer and of Fabric have in common: the engine of a module."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from patrickstar._engine.engine import Engine
from patrickstar._engine.initialize import initialize
from patrickstar.config import Config
from patrickstar.errors import TrainingError
from patrickstar.integrations._barrier import barrier
from patrickstar.integrations._merged_config import check_precision, merge_config
from patrickstar.integrations._optimizers import convert, end_states, move_scheduler
from patrickstar.integrations.lightning._processes import Processes
from patrickstar.optim import Optimizer

USED_BY = "_patrickstar_used_by"
"""Attribute of a module with the strategy whose engine manages it."""


class UsedBy:
    """Strategy whose engine manages a module. A copy of the module is managed by none."""

    def __init__(self, strategy: "EngineStrategy | None" = None) -> None:
        self._reference = None if strategy is None else weakref.ref(strategy)

    @property
    def strategy(self) -> "EngineStrategy | None":
        return None if self._reference is None else self._reference()

    def __reduce__(self) -> Any:
        return UsedBy, ()


class EngineForward(nn.Module):
    """Module whose forward calls the engine. It holds no parameters."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the engine's module too: Lightning's evaluations call `trainer.model.eval()`."""
        self.engine.module.train(mode)
        return super().train(mode)


class EngineStrategy(Processes):
    """Strategy with an engine.

    Args:
        config: The user's configuration; see `Config.of`.
        **options: Keyword arguments of `Processes`.

    Raises:
        ConfigError: An option is invalid.
    """

    caller: str
    """Class of Lightning with the arguments for precision and device, for texts of errors."""
    creators: str
    """Calls that create an engine, for texts of errors."""

    def __init__(self, config: Config | Mapping[str, Any] | str | Path | None = None, **options: Any) -> None:
        self._user_config = Config.of(config)
        self._engine: Engine | None = None
        self._accumulates = False
        self._frozen_for_evaluation: list[nn.Parameter] = []
        self._given: torch.optim.Optimizer | None = None
        self._undo: list[Callable[[], None]] = []
        super().__init__(**options)

    @property
    def engine(self) -> Engine:
        """Engine that manages the module.

        Raises:
            TrainingError: There is none yet.
        """
        if self._engine is None:
            raise TrainingError(f"there is no engine yet: {self.creators} create it")
        return self._engine

    def make_engine(self, model: nn.Module, config: Config) -> Engine:
        """Create the engine. Override this method to customize the engine.

        Args:
            model: The module.
            config: The configuration that results from the arguments, the optimizer and the user's `config`.

        Returns:
            The engine that manages the module.

        Raises:
            BudgetError, ConfigError, ModelError: As `patrickstar.initialize`.
        """
        return initialize(model, config)[0]

    def manage_training(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
        """Create the engine for training, with an optimizer converted to its own unless the user's config has one."""
        chosen = "optimizer" in self._user_config.model_fields_set
        options = self._user_config.optimizer if chosen else convert(optimizer, module)
        self._engine = self.make_engine(module, self._merged(options))
        self._given = optimizer
        return self._engine

    def move(self, scheduler: LRScheduler) -> None:
        """Let a scheduler of the given optimizer change the learning rates of the engine's until the engine closes."""
        if self._given is not None and scheduler.optimizer is self._given:
            self._undo.append(move_scheduler(scheduler, self._given, self.engine.optimizer))

    def manage_evaluation(self, module: nn.Module) -> Engine:
        """Create an engine without masters and states."""
        self._frozen_for_evaluation = [param for param in module.parameters() if param.requires_grad]
        module.requires_grad_(False)
        try:
            self._engine = self.make_engine(module, self._merged(self._user_config.optimizer))
        finally:
            if self._engine is None:
                self.close()
        return self._engine

    def _merged(self, optimizer: Optimizer) -> Config:
        precision = self.engine_precision
        check_precision(self._user_config, precision, f"{self.caller}(precision=...) selects")
        selected = f"the {self.caller} selects the device {str(self.root_device)!r} (accelerator=...)"
        return merge_config(self._user_config, precision, self.root_device, selected, optimizer)

    @property
    def engine_precision(self) -> str:
        """Precision of the engine, by the arguments of Lightning."""
        raise NotImplementedError

    def take_over(self, module: nn.Module) -> None:
        """Close this strategy's engine and the one of an earlier strategy that still manages the module."""
        self.close()
        earlier = vars(module).get(USED_BY, UsedBy())
        if earlier.strategy is not None:
            earlier.strategy.close()
        vars(module)[USED_BY] = UsedBy(self)

    def close(self) -> None:
        """Close the engine, if there is one, and let the module's parameters require gradients as before."""
        if self._engine is not None:
            if self._given is not None and self._engine.stats.total.steps:
                end_states(self._given)
            self._engine.close()
            self._engine = None
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._given = None
        for param in self._frozen_for_evaluation:
            param.requires_grad_(True)
        self._frozen_for_evaluation.clear()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let gradients of backwards in this context be averaged over processes in a later one."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def synchronize(self) -> None:
        """Wait for the other processes, and serve their requests for this one's shards meanwhile."""
        barrier(self._engine)
