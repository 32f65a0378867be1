"""Integration with Hugging Face TRL: its trainers with the engine as backend."""

from typing import TYPE_CHECKING

from patrickstar.integrations._on_first_use import on_first_use
from patrickstar.integrations.transformers import TRAINER

if TYPE_CHECKING:
    from patrickstar.integrations.trl._trainers import (
        DPOTrainer,
        GRPOTrainer,
        KTOTrainer,
        RewardTrainer,
        RLOOTrainer,
        SFTTrainer,
    )

__all__ = ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer", "SFTTrainer"]

__getattr__ = on_first_use(__name__, {name: ("_trainers", {"trl": "1.16"} | TRAINER) for name in __all__})
