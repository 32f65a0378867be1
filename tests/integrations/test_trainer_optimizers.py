"""Optimizers that the Trainer chooses by its arguments, and those that it refuses."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import patrickstar as ps
from patrickstar.errors import ConfigError
from patrickstar.integrations.transformers import Trainer
from patrickstar.testing import assert_same_bits

from .trainers import Stressed, arguments, close, create, gpt2, logged, texts


def test_choice_of_the_optimizer(tmp_path):
    def chosen(config=None, **options):
        trainer = create(Trainer, tmp_path, config=config, **options)
        trainer.create_optimizer()
        close(trainer)
        return trainer.engine.config.optimizer

    default = chosen(learning_rate=3e-4, adam_beta1=0.8)
    assert isinstance(default, ps.AdamW) and default.lr == 3e-4 and default.betas == (0.8, 0.999)
    sgd = chosen(optim="sgd", optim_args="momentum=0.9")
    assert isinstance(sgd, ps.SGD) and sgd.momentum == 0.9
    assert chosen(optim="rmsprop").kind is torch.optim.RMSprop
    assert isinstance(chosen(optimizer_cls_and_kwargs=(ps.Lion, {"lr": 1e-4})), ps.Lion)
    assert chosen(optimizers=(partial(torch.optim.Adam, lr=1e-3), None)).kind is torch.optim.Adam
    lion = chosen(optim="lion_32bit", learning_rate=3e-4, adam_beta1=0.8)
    assert isinstance(lion, ps.Lion) and lion.lr == 3e-4 and lion.betas == (0.8, 0.999)
    paged = chosen(optim="paged_adamw_32bit", learning_rate=3e-4)
    assert isinstance(paged, ps.AdamW) and paged.lr == 3e-4
    assert chosen(optim="adafactor", learning_rate=3e-4).options["lr"] == 3e-4
    free = chosen(optim="schedule_free_adamw", learning_rate=3e-4, adam_beta1=0.8, optim_args="r=1, weight_lr_power=1")
    assert isinstance(free, ps.ScheduleFreeAdamW) and (free.lr, free.betas) == (3e-4, (0.8, 0.999))
    assert (free.r, free.weight_lr_power) == (1.0, 1.0)
    muon = chosen(optimizers=(partial(torch.optim.Muon, lr=1e-3, momentum=0.9), None))
    assert isinstance(muon, ps.Muon) and muon.momentum == 0.9
    muon = chosen(optimizer_cls_and_kwargs=(torch.optim.Muon, {"lr": 1e-3}))
    assert isinstance(muon, ps.Muon) and muon.lr == 1e-3
    own = ps.Lion(lr=1e-5)
    assert chosen(config=ps.Config(optimizer=own)) == own
    assert chosen(config=ps.Config(chunk_size="16KiB"), optim="adagrad").kind is torch.optim.Adagrad


def test_unsupported_optimizers_are_rejected(tmp_path):
    model = gpt2()
    args = arguments(tmp_path)
    made = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(made)
    with pytest.raises(ConfigError, match=r"give the class, not an optimizer"):
        Trainer(model, args, optimizers=(made, None)).create_optimizer()
    with pytest.raises(ConfigError, match=r"scheduler can't be passed"):
        Trainer(model, args, optimizers=(None, schedule))
    for name, reason in [
        ("lion_8bit", r"optim='lion_8bit' is not supported: it stores states in 8 bits"),
        ("paged_lion_8bit", r"it stores states in 8 bits, .* Use optim='adamw_8bit'"),
        ("rmsprop_bnb", r"RMSprop of bitsandbytes updates tensors with kernels of its own"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            Trainer(model, arguments(tmp_path, optim=name)).create_optimizer()

    class Own(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            return self.optimizer

    trainer = Own(model, args, train_dataset=texts())
    with pytest.raises(ConfigError, match=r"not in create_optimizer"):
        trainer.train()


def test_schedule_free_training_evaluates_and_saves_the_average(tmp_path):
    """The Trainer calls `eval` and `train` of the optimizer; a resumed run has the bits of one that went on."""

    def made(folder, **options):
        own = dict(optim="schedule_free_adamw", lr_scheduler_type="constant", max_grad_norm=100.0)
        own |= dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, max_steps=4)
        return create(Stressed, folder, eval_dataset=texts(7, seed=1), **own | options)

    trainer = made(tmp_path / "whole")
    trainer.train()
    expected, log = trainer.engine.state_dict(), logged(trainer)
    with trainer.engine.averaged():
        average = trainer.engine.state_dict()
    last = tmp_path / "whole" / "checkpoint-4"
    saved = load_file(last / "model.safetensors")
    close(trainer)
    apart = {name: (average[name] - value).abs().max().item() for name, value in saved.items()}
    assert max(apart.values()) < 1e-6, "the saved weights are the average, up to rounding of its conversion"
    assert any((expected[name] - value).abs().max().item() > 1e-4 for name, value in saved.items())
    trainer = made(tmp_path / "whole", output_dir=str(tmp_path / "resumed"))
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_bits(expected, trainer.engine.state_dict(), "parameters of the resumed run")
    evaluations = [[entry for entry in each if "eval_loss" in entry] for each in (log, logged(trainer))]
    assert evaluations[0] == evaluations[1]
