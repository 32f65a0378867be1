"""Integration with Hugging Face transformers: loading of local model folders, and a Trainer."""

from typing import TYPE_CHECKING, Any

from patrickstar.integrations.transformers._from_pretrained import from_pretrained

if TYPE_CHECKING:
    from patrickstar.integrations.transformers._trainer import Trainer

__all__ = ["Trainer", "from_pretrained"]


def __getattr__(name: str) -> Any:
    # The Trainer needs accelerate, which from_pretrained does not: import it on first use.
    if name == "Trainer":
        from patrickstar.integrations.transformers._trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
