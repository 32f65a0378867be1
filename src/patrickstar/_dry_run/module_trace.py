"""Which module of a model runs: named when a dry run fails or does not fit."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from patrickstar.errors import BudgetError, ModelError, PatrickStarError


class ModuleTrace:
    """Modules whose forward runs, and the autograd nodes that each module's forward has created."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._stack: list[tuple[nn.Module, int]] = []
        """Running modules, with the first sequence number of their nodes."""
        self._nodes: list[tuple[range, nn.Module]] = []
        """Sequence numbers of the nodes of each module; a module follows those that it contains."""
        self._failed: tuple[int, str] | None = None
        """Identity of the last exception that left a module, and its innermost module; the exception itself would keep
        the tensors of its frames alive."""
        self._outer: BaseException | None = None
        """Exception that was being handled before."""
        self._node: Any = None
        """Autograd node of the last operator, None in a forward."""
        self._phase = "forward"
        self._peak_bytes = -1
        self.peak_module: str | None = None
        """Description of the module that ran when non-model data was largest."""

    def note_operator(self, non_model_bytes: int) -> None:
        """Record the autograd node that the current operator belongs to, and whether it is the peak of memory."""
        self._node = torch._C._current_autograd_node()
        if non_model_bytes > self._peak_bytes:
            self._peak_bytes, self.peak_module = non_model_bytes, self._running(None)

    def phase(self) -> str:
        """Return the part of the step that runs: forward, backward or, after a backward and outside of all, step."""
        if torch._C._current_graph_task_id() != -1:  # also while checkpointing runs a forward again
            self._phase = "backward"
        elif self._stack:
            self._phase = "forward"
        elif self._phase == "backward":
            self._phase = "step"
        return self._phase

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Name the module in errors: in ModelErrors for operators that fail, and as `BudgetError.module`."""
        # Checkpointing ends a recomputed forward by an exception, so that modules are also left by exceptions.
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        self._stack.clear()
        self._nodes.clear()
        self._failed, self._outer = None, sys.exception()
        self._node, self._peak_bytes, self.peak_module = None, -1, None
        self._phase = "forward"
        try:
            yield
        except BudgetError as error:
            error.module = error.module or self._running(error.parameter)
            raise
        except PatrickStarError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            source = "the code outside of all modules"
            if self._failed is not None and self._failed[0] == id(error):
                source = self._failed[1]
            raise ModelError(
                f"{source} cannot run on meta tensors: {error}. Train without a dry run: the first step then traces "
                f"the model"
            ) from error
        finally:
            self._outer = None
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append((module, torch._C._autograd._get_sequence_nr()))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        error = sys.exception()
        if error is self._outer:
            error = None
        if isinstance(error, BudgetError):
            error.module = error.module or self._running(error.parameter)
        elif error is not None and (self._failed is None or self._failed[0] != id(error)):
            self._failed = id(error), self._describe(module)
        module, first = self._stack.pop()
        self._nodes.append((range(first, torch._C._autograd._get_sequence_nr()), module))

    def _running(self, parameter: str | None) -> str | None:
        """Describe the module that runs; in a backward, the one that created the node or has the parameter."""
        if self._stack:
            return self._describe(self._stack[-1][0])
        if self._node is None:
            return None
        owner = None
        if parameter is not None:
            prefix = parameter.rpartition(".")[0]
            owner = next((module for module, name in self._names.items() if name == prefix), None)
        if owner is None:
            number = self._node._sequence_nr()
            owner = next((module for numbers, module in self._nodes if number in numbers), None)
        return None if owner is None else f"the backward of {self._describe(owner)}"

    def _describe(self, module: nn.Module) -> str:
        name = self._names.get(module)
        return f"{f'module {name!r}' if name else 'the model'} ({type(module).__name__})"
