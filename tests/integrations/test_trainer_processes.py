"""Trainer with several processes: the engine shards the model, transformers shards the data."""

from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from distributed.ranks import run
from distributed.reference import AveragingTrainer

import patrickstar as ps
from patrickstar._distributed.process_group import World
from patrickstar.integrations.transformers import Trainer
from patrickstar.testing import NoMeter, assert_same_bits

from .trainers import BUDGET, Protocol, close, create, texts, trained, weights


class Averaging(Protocol):
    """Reference for several processes: gradients averaged in rank order, without DDP."""

    reference_kind = AveragingTrainer

    def create_optimizer(self, model=None):
        self.accelerator.prepare_model = lambda model, **options: model
        return super().create_optimizer(model)

    def training_step(self, *args, **options):
        loss = super().training_step(*args, **options)
        if self.accelerator.sync_gradients:
            self.reference.reduce()
        return loss


class Uneven(Trainer):
    """One process keeps gathered chunks; the other evicts them and requests them again, also in evaluation."""

    def make_engine(self, model, config):
        world = World.find(torch.device("cpu"))
        return ps.Engine(
            model, config, meter=NoMeter(), evict_everything=world.rank == 0, poison=world.rank == 0, world=world
        )


def options(bf16: bool):
    evaluation = dict(eval_strategy="steps", eval_steps=2, include_num_input_tokens_seen="all")
    return dict(max_grad_norm=0.3, num_train_epochs=1, bf16=bf16) | evaluation


def exact(folder: str) -> None:
    """Results in each process are bitwise those of the documented order of summation."""
    found = []
    for kind in (Averaging, Uneven):
        trainer = create(kind, folder, eval_dataset=texts(7, seed=1), **options(bf16=kind is Uneven))
        trainer.args.patrickstar_bf16 = True
        found.append(trained(trainer))
    assert found[0][0] == found[1][0], (found[0][0], found[1][0])
    assert_same_bits(found[0][1], found[1][1], "parameters")


def near_ddp(folder: str) -> None:
    """Results are close to those of transformers' Trainer with DDP, which adds gradients in another order."""
    found = []
    for kind in (transformers.Trainer, Trainer):
        config, data = ps.Config(precision="fp32"), texts(7, seed=1)
        found.append(trained(create(kind, folder, config=config, eval_dataset=data, **options(bf16=False)))[0])
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        assert all(abs(value - other[key]) <= 1e-4 * max(1.0, abs(value)) for key, value in one.items()), (one, other)


def resumed(folder: str) -> None:
    """Both processes save to one checkpoint and resume from it; rank 0 writes common files once."""
    found = []
    for again in (False, True):
        args = dict(bf16=True, save_strategy="steps", save_steps=1, max_steps=2, max_grad_norm=0.3)
        trainer = create(Trainer, folder, config=BUDGET.model_copy(update={"device_memory": None}), **args)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1" if again else None)
        found.append(weights(trainer))
        if not again:
            trainer.save_model(f"{folder}/model")
        close(trainer)
    assert_same_bits(*found, "parameters")
    dist.barrier()
    if dist.get_rank() == 0:
        plain = transformers.GPT2LMHeadModel.from_pretrained(f"{folder}/model")
        assert_same_bits(found[0], plain.state_dict(), "loaded by transformers")
        names = {path.name for path in Path(folder, "checkpoint-1").iterdir()}
        assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "patrickstar"} <= names


def run_all(folder: str) -> None:
    """Run all cases in one start of the processes, which is slow."""
    exact(f"{folder}/exact")
    near_ddp(f"{folder}/ddp")
    resumed(f"{folder}/resumed")


def test_two_processes(tmp_path):
    run(2, run_all, 600, folder=str(tmp_path))
