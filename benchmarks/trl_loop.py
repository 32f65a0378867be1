"""Measure the overhead of TRL's SFTTrainer on the engine against the engine's own loop.

python benchmarks/trl_loop.py [--device cpu] [--model gpt-40m] [--batch 1] [--sequence 512] [--rounds 31]
Measured as in `trainer.py`. Both models compute TRL's loss, entropy and accuracy of tokens (`add_fused_lm_head`).
"""

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from trainer import WARM_UP, AlternatingSteps, Loop, arguments, build, compare, train
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig
from trl.trainer.sft_trainer import add_fused_lm_head

from patrickstar._models.presets import PRESETS
from patrickstar.integrations.trl import SFTTrainer

PAD = "<pad>"


class FusedLoop(Loop):
    """Loop with the loss of TRL."""

    def build(self, name: str) -> Any:
        """Return the model with TRL's forward."""
        model = super().build(name)
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        return model

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean over the tokens that are predicted."""
        outputs = self.engine(**batch, use_cache=False, fused_lm_head=True)
        loss: torch.Tensor = -outputs.log_probs.sum() / batch["labels"][:, 1:].numel()
        return loss


def run(options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the seconds of a step of the SFTTrainer and of the engine's loop, in pairs."""
    steps = WARM_UP + options.rounds
    vocabulary = PRESETS[options.model].config().vocab_size
    ids = torch.randint(1, vocabulary, (steps * options.batch, options.sequence)).tolist()
    words = Tokenizer(models.WordLevel({PAD: 0}, unk_token=PAD))
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder,
            gradient_checkpointing=False,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            **arguments(options),
        )
        trainer = SFTTrainer(
            build(options.model),
            args,
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=PAD),
        )
        trainer.create_optimizer()
        starts = range(0, len(ids), options.batch)
        batches = [
            trainer.data_collator([{"input_ids": row} for row in ids[start : start + options.batch]])
            for start in starts
        ]
        return train(trainer, AlternatingSteps(FusedLoop(options, trainer._param_groups), batches))


if __name__ == "__main__":
    compare("trl_loop", "the SFTTrainer", __doc__, "clipping, a log entry per step", run)
