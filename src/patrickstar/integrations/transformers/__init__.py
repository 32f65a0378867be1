"""Integration with Hugging Face transformers: local model folders, a Trainer, tensor and expert parallelism."""

from typing import TYPE_CHECKING

from patrickstar.integrations._on_first_use import on_first_use

if TYPE_CHECKING:
    from patrickstar.integrations.transformers._from_pretrained import from_pretrained
    from patrickstar.integrations.transformers._parallelize import parallelize
    from patrickstar.integrations.transformers._stacked_experts import stack_experts
    from patrickstar.integrations.transformers._trainer import Trainer

__all__ = ["Trainer", "from_pretrained", "parallelize", "stack_experts"]

TRANSFORMERS = {"transformers": "5.17"}
TRAINER = TRANSFORMERS | {"accelerate": "1.15"}
PLANS = {"transformers": "5.23"}
"""The version whose functions apply a plan by themselves, also one for experts."""

__getattr__ = on_first_use(
    __name__,
    {
        "from_pretrained": ("_from_pretrained", TRANSFORMERS),
        "parallelize": ("_parallelize", PLANS),
        "stack_experts": ("_stacked_experts", PLANS),
        "Trainer": ("_trainer", TRAINER),
    },
)
