"""Integration with Hugging Face transformers: local model folders, a Trainer, tensor and expert parallelism."""

from typing import TYPE_CHECKING, Any

from patrickstar.integrations.transformers._from_pretrained import from_pretrained
from patrickstar.integrations.transformers._parallelize import parallelize
from patrickstar.integrations.transformers._stacked_experts import stack_experts

if TYPE_CHECKING:
    from patrickstar.integrations.transformers._trainer import Trainer

__all__ = ["Trainer", "from_pretrained", "parallelize", "stack_experts"]


def __getattr__(name: str) -> Any:
    # The Trainer needs accelerate, which the others do not: import it on first use.
    if name == "Trainer":
        from patrickstar.integrations.transformers._trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
