"""Integration with Hugging Face TRL: its trainers with the engine as backend."""

from patrickstar.integrations.trl._trainers import (
    DPOTrainer,
    GRPOTrainer,
    KTOTrainer,
    RewardTrainer,
    RLOOTrainer,
    SFTTrainer,
)

__all__ = ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer", "SFTTrainer"]
