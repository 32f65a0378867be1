"""Arguments of the frameworks that name no precision leave it to the configuration, which chooses by default."""

import warnings

import pytest
import rates
from accelerate.state import AcceleratorState

import patrickstar as ps
from patrickstar.integrations.accelerate import Accelerator
from patrickstar.integrations.transformers import Trainer
from patrickstar.integrations.transformers._training_args import merge

from .trainers import arguments, create, gpt2, texts


@pytest.mark.parametrize(
    ("flags", "config", "precision"),
    [
        ({}, {}, "auto"),
        ({}, {"precision": "fp32"}, "fp32"),
        ({}, {"precision": "bf16"}, "bf16"),
        ({"bf16": True}, {}, "bf16"),
        ({"bf16": True}, {"precision": "auto"}, "bf16"),
    ],
)
def test_arguments_of_a_trainer(tmp_path, flags, config, precision):
    assert merge(ps.Config(**config), arguments(tmp_path, **flags), ps.AdamW()).precision == precision


def test_a_resumed_trainer_keeps_the_precision_of_its_checkpoint(tmp_path, monkeypatch):
    options = dict(save_strategy="steps", save_steps=1, num_train_epochs=1, train_dataset=texts(8), config=None)
    monkeypatch.setattr(rates.MEASURED, rates.fixed(bf16=2e9))
    first = create(Trainer, tmp_path, max_steps=1, **options)
    first.train()
    assert first.engine.config.precision == "bf16"

    def never(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(rates.MEASURED, never)
    resumed = create(Trainer, tmp_path, max_steps=2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.train(resume_from_checkpoint=True)
    assert resumed.engine.config.precision == "bf16"


@pytest.mark.parametrize(("bf16", "named"), [(2e9, "bf16"), (0.1e9, "no")])
def test_an_accelerator_knows_its_precision_before_there_is_a_model(monkeypatch, bf16, named):
    monkeypatch.setattr(rates.MEASURED, rates.fixed(bf16=bf16))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # as `accelerate launch` sets it unless it is asked
    accelerator = Accelerator(cpu=True)
    assert accelerator.mixed_precision == named
    accelerator.prepare(gpt2(), ps.AdamW())
    assert accelerator.engine.config.precision == {"bf16": "bf16", "no": "fp32"}[named]
    assert "precision" not in accelerator.engine.config.model_fields_set
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"
