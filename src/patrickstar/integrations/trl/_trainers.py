"""Trainers of TRL with the engine as backend."""

import trl

from patrickstar.integrations.transformers._trainer import Trainer

# [Note: reference models]
# A model that a trainer only reads (the reference of DPO, KTO, GRPO and RLOO, and reward models) is prepared by
# `accelerator.prepare_model(evaluation_mode=True)`. The engine then stores it in frozen chunks under the same budgets.
# With PEFT there is none: the trainers disable the adapters instead.


class SFTTrainer(Trainer, trl.SFTTrainer):  # type: ignore[misc]
    """`trl.SFTTrainer` for models larger than memory. `config`: see `patrickstar.integrations.transformers.Trainer`."""


class DPOTrainer(Trainer, trl.DPOTrainer):  # type: ignore[misc]
    """`trl.DPOTrainer` for models larger than memory; the budgets contain the reference model, too.

    `config`: see `patrickstar.integrations.transformers.Trainer`.
    """


class RewardTrainer(Trainer, trl.RewardTrainer):  # type: ignore[misc]
    """`trl.RewardTrainer` for models larger than memory.

    `config`: see `patrickstar.integrations.transformers.Trainer`.
    """


class GRPOTrainer(Trainer, trl.GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer` for models larger than memory; the budgets contain reference and reward models, too.

    `config`: see `patrickstar.integrations.transformers.Trainer`.
    """


class RLOOTrainer(Trainer, trl.RLOOTrainer):  # type: ignore[misc]
    """`trl.RLOOTrainer` for models larger than memory; the budgets contain reference and reward models, too.

    `config`: see `patrickstar.integrations.transformers.Trainer`.
    """


class KTOTrainer(Trainer, trl.KTOTrainer):  # type: ignore[misc]
    """`trl.KTOTrainer` for models larger than memory; the budgets contain the reference model, too.

    `config`: see `patrickstar.integrations.transformers.Trainer`.
    """
