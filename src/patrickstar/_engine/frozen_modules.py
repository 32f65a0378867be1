"""Further modules of an engine, whose parameters are only read, beside the model that it trains."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from patrickstar.errors import ModelError


class WithFrozen(nn.Module):
    """A model and frozen modules as one module.

    The model's parameters have their own names, those of a frozen module begin with its name.

    Args:
        model: The model to train.
        frozen: Modules by name. Their parameters are frozen.

    Raises:
        ModelError: A name is not an identifier or is taken by a submodule of the model, or a module shares a parameter
            with another one.
    """

    def __init__(self, model: nn.Module, frozen: Mapping[str, nn.Module]) -> None:
        super().__init__()
        owners = {param: name for name, param in model.named_parameters()}
        used = {name.partition(".")[0] for name, _ in model.named_modules()} | {*owners.values()}
        for name, module in frozen.items():
            if not name.isidentifier() or name in used:
                raise ModelError(
                    f"a frozen module can't be named {name!r}: choose an identifier that is not the name of a "
                    f"submodule of {type(model).__name__}"
                )
            for own, param in module.named_parameters():
                if param in owners:
                    raise ModelError(
                        f"parameter {own!r} of the frozen module {name!r} is the same tensor as {owners[param]!r}: "
                        f"pass a copy of the module"
                    )
                owners[param] = f"{name}.{own}"
        self.model = model
        self.frozen = nn.ModuleDict(frozen)
        self.frozen.requires_grad_(False)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return an iterator over all modules, as `nn.Module.named_modules`."""
        memo = set() if memo is None else memo
        yield from self.model.named_modules(memo, prefix, remove_duplicate)
        for name, module in self.frozen.items():
            yield from module.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)


def with_frozen(model: nn.Module, frozen: Mapping[str, nn.Module]) -> nn.Module:
    """Return all modules whose parameters are managed: the model, and those that are only read, if there are any."""
    return WithFrozen(model, frozen) if frozen else model
