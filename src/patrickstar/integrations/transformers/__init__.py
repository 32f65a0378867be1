"""Hugging Face transformers on top of the engine: `from patrickstar.integrations.transformers import Trainer`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patrickstar.integrations.transformers.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    # The Trainer needs accelerate, which whoever wants other parts of this package may not have.
    if name == "Trainer":
        from patrickstar.integrations.transformers.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
