"""Trainer with several processes: the engine shards the model, transformers shards the data.

With transformers' `DistributedConfig`: tensor and expert parallelism, four processes.
"""

import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from distributed.ranks import run
from distributed.reference import AveragingTrainer
from peft import LoraConfig, get_peft_model
from sampling import nightly
from torch.utils.data import IterableDataset
from transformers import DistributedConfig, TrainerCallback

import patrickstar as ps
from patrickstar._distributed.process_group import World
from patrickstar.errors import ConfigError
from patrickstar.integrations._meshes import MeshSizes, meshes
from patrickstar.integrations.transformers import Trainer, parallelize
from patrickstar.testing import NoMeter, assert_same_bits

from . import trainers
from .tiny import EXPERTS, SIZES
from .trainers import Protocol, arguments, close, create, gpt2, texts, trained, weights

BUDGET = ps.Config(chunk_size="16KiB", precision="fp32")
RATE, NORM, BATCH = 1e-2, 0.3, 4
KINDS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {"num_key_value_heads": 2}),
    "phi": (transformers.PhiForCausalLM, transformers.PhiConfig, {"resid_pdrop": 0.2, "embd_pdrop": 0.2}),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig, EXPERTS | {"num_local_experts": 4}),
}


def build(kind: str):
    """Build a tiny model: the same in each process."""
    torch.manual_seed(1)
    model, config, options = KINDS[kind]
    return model(config(**SIZES | options, use_cache=False))


def trainer_of(kind: str, folder: str, division: DistributedConfig | None, data=None, config=BUDGET, **options):
    """Return a Trainer of a model with a `DistributedConfig`."""
    model = build(kind)
    model.config.distributed_config = division
    options = dict(gradient_accumulation_steps=1, max_steps=2, learning_rate=RATE, max_grad_norm=NORM) | options
    fixed = dict(weight_decay=0.0, warmup_steps=0, lr_scheduler_type="constant", train_sampling_strategy="sequential")
    args = arguments(folder, per_device_train_batch_size=BATCH, **fixed | options)
    return Trainer(model, args, train_dataset=data or texts(32), config=config)


def steps_of_the_engine(kind: str, sizes: MeshSizes, precision: str):
    """Train two steps with the engine's own loop, and return losses, norms and parameters."""
    model, built = build(kind), meshes(sizes, "cpu")
    parallelize(model, tp=built.tp, ep=built.ep)
    config = BUDGET.model_copy(
        update={"device": "cpu", "precision": precision, "optimizer": ps.AdamW(lr=RATE, weight_decay=0)}
    )
    losses, norms = [], []
    with ps.initialize(model.train(), config, mesh=built.data) as (engine, optimizer):
        for step in range(2):
            first = step * BATCH * engine.data_size
            samples = texts(32)[first : first + BATCH * engine.data_size]
            count = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
            mine = samples[engine.data_rank * BATCH :][:BATCH]
            batch = {name: torch.stack([sample[name] for sample in mine]) for name in mine[0]}
            loss = engine(**batch, num_items_in_batch=count).loss * engine.data_size
            engine.backward(loss)
            norms.append(engine.clip_grad_norm_(NORM).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(engine.average(loss.item()))
        return losses, norms, engine.state_dict()


EXACT = [
    ("mixtral", MeshSizes(4, tp=2, ep=4), True),
    ("mixtral", MeshSizes(4, ep=2, replicas=2), False),
    ("llama", MeshSizes(4, tp=2), False),
    ("mixtral", MeshSizes(4, ep=4), False),
]


def exact(folder: str, count: int) -> None:
    """Losses, norms and parameters are those of the engine's own loop; so are counts of tokens and operations."""
    flos = set()
    for kind, sizes, bf16 in EXACT[:count]:
        precision = "bf16" if bf16 else "fp32"
        losses, norms, values = steps_of_the_engine(kind, sizes, precision)
        division = DistributedConfig(
            tp_size=sizes.tp, ep_size=sizes.ep, fsdp_size=sizes.shards, dp_replicate_size=sizes.replicas
        )
        config = BUDGET.model_copy(update={"precision": precision})
        trainer = trainer_of(kind, folder, division, config=config, bf16=bf16, include_num_input_tokens_seen="all")
        trainer.train()
        assert trainer.engine.data_size == sizes.data
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [entry["grad_norm"] for entry in log] == norms
        assert [entry["loss"] for entry in log] == pytest.approx(losses, rel=1e-6)
        assert log[-1]["num_input_tokens_seen"] == 2 * sizes.data * BATCH * 16
        assert_same_bits(values, weights(trainer), "parameters")
        if kind == "mixtral":
            flos.add(trainer.state.total_flos / sizes.data)
        close(trainer)
    assert len(flos) == 1, f"operations per batch: {flos}"


def evaluated(folder: str) -> None:
    """Each sample counts once in metrics and predictions, whichever processes share a batch."""
    trainer = trainer_of("llama", folder, DistributedConfig(tp_size=2, fsdp_size=2), per_device_eval_batch_size=2)
    for data in (texts(7, seed=1), texts(8, seed=1)):
        found = trainer.predict(data)
        assert found.predictions.shape == (len(data), 16, SIZES["vocab_size"])
        assert np.array_equal(found.label_ids, torch.stack([sample["labels"] for sample in data]).numpy())
        again = trainer.predict(data[:1])
        assert np.allclose(again.predictions, found.predictions[:1], atol=1e-5)
        objects = trainer.accelerator.gather_for_metrics([f"batch {trainer._parallelism.data_rank}"])
        assert objects[:2] == ["batch 0", "batch 1"]
    close(trainer)


def resumed(folder: str) -> None:
    """Checkpoints and saved models are those of the whole model; another mesh resumes them."""
    options = dict(save_strategy="steps", save_steps=1)
    division = {"tp_size": 2, "fsdp_size": 2}
    trainer = trainer_of("mixtral", folder, DistributedConfig(**division, ep_size=4), **options)
    trainer.train()
    trainer.save_model(f"{folder}/model")
    expected = weights(trainer)
    trainer.model.save_pretrained(f"{folder}/by the model")
    close(trainer)
    dist.barrier()
    for name in ("model", "by the model"):
        plain = transformers.MixtralForCausalLM.from_pretrained(f"{folder}/{name}")
        assert_same_bits(expected, plain.state_dict(), "loaded by transformers")
        assert "distributed_config" not in Path(folder, name, "config.json").read_text()
    for ep, close_to in [(4, assert_same_bits), (1, near)]:
        again = trainer_of("mixtral", folder, DistributedConfig(**division, ep_size=ep), **options)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
        close_to(expected, weights(again), f"resumed with ep={ep}")
        close(again)


def near(expected, actual, label) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=1e-4, rtol=1e-3, msg=f"{label}: {name}")


class OwnSeed(TrainerCallback):
    """Gives each process random numbers of its own."""

    def on_step_end(self, args, state, control, **kwargs) -> None:
        torch.manual_seed(args.process_index)


def generators(folder: str) -> None:
    """Processes that share a batch drop the same activations, also after another mesh has saved their generators."""
    options = dict(save_strategy="steps", save_steps=1, max_steps=1)
    trainer = trainer_of("phi", folder, None, **options)
    trainer.add_callback(OwnSeed())
    trainer.train()
    close(trainer)
    trainer = trainer_of("phi", folder, DistributedConfig(tp_size=2, fsdp_size=2), **options | {"max_steps": 3})
    loader = trainer.get_train_dataloader()
    assert loader.worker_init_fn.keywords["rank"] == dist.get_rank() // 2
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    values = [None] * 4
    dist.all_gather_object(values, {name: value.sum().item() for name, value in weights(trainer).items()})
    assert values == values[:1] * 4
    close(trainer)


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self):
        return iter(texts(32))


def streamed(folder: str) -> None:
    """Iterable datasets are read by each process; batches that rank 0 dispatches are refused."""
    division = DistributedConfig(tp_size=2, fsdp_size=2)
    refused = trainer_of("llama", folder, division, Stream())
    with pytest.raises(ConfigError, match="accelerate can't dispatch batches from rank 0 beside tensor parallelism"):
        refused.train()
    trainer = trainer_of("llama", folder, division, Stream(), accelerator_config={"dispatch_batches": False})
    trainer.train()
    assert_same_bits(steps_of_the_engine("llama", MeshSizes(4, 2), "fp32")[2], weights(trainer), "parameters")
    close(trainer)


def refused(folder: str) -> None:
    """Refuse by name what the engine can't do, in each process."""
    with pytest.raises(ConfigError, match=r"is for 2 processes .*, and there are 4: set fsdp_size=2"):
        trainer_of("llama", folder, DistributedConfig(tp_size=2))
    with pytest.raises(ConfigError, match="train_sampling_strategy='batch_rebalance'"):
        division = DistributedConfig(tp_size=2, fsdp_size=2)
        trainer_of("llama", folder, division, train_sampling_strategy="batch_rebalance")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PEFT's use of transformers
        adapted = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"]))
    adapted.config.distributed_config = DistributedConfig(tp_size=2, fsdp_size=2)
    with pytest.raises(ConfigError, match="can't be used with adapters of PEFT, whose layers no plan divides"):
        Trainer(adapted, arguments(folder), train_dataset=texts(32))
    quantized = build("llama")
    quantized.config.distributed_config, quantized.quantization_method = DistributedConfig(fsdp_size=4), "bitsandbytes"
    with pytest.raises(ConfigError, match="can't be used with weights quantized by bitsandbytes"):
        Trainer(quantized, arguments(folder), train_dataset=texts(32))
    trainer = trainer_of("llama", folder, None)
    trainer.model.config.distributed_config = DistributedConfig(tp_size=2, fsdp_size=2)
    with pytest.raises(ConfigError, match="was set after the Trainer was created"):
        trainer.train()


def run_cases(folder: str, every: bool) -> None:
    """Run cases in one start of the processes, which is slow."""
    ps.join()
    exact(f"{folder}/exact", len(EXACT) if every else 1)
    for case in (evaluated, refused, *((resumed, generators, streamed) if every else ())):
        case(f"{folder}/{case.__name__}")


@pytest.mark.long("four processes with transformers' Trainer")
def test_four_processes(tmp_path):
    run(4, run_cases, folder=str(tmp_path), every=nightly())


def test_one_process(tmp_path):
    model = gpt2()
    model.config.distributed_config = DistributedConfig()
    assert Trainer(model, arguments(tmp_path)).mesh is None
    model.config.distributed_config = {"tp_size": 2}
    with pytest.raises(ConfigError, match=r"DistributedConfig is for 2 processes .*, and there are 1"):
        Trainer(model, arguments(tmp_path))


def test_models_that_are_sharded_already(tmp_path):
    model = gpt2()
    model._is_distributed_loading_by_transformers = True
    model.config.distributed_config = SimpleNamespace(dp_size=2)
    with pytest.raises(ConfigError, match="has sharded the model, and the engine does so itself: load it without"):
        Trainer(model, arguments(tmp_path))


# Without meshes


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


def averaged(folder: str) -> None:
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


def resumed_by_both(folder: str) -> None:
    """Both processes save to one checkpoint and resume from it; rank 0 writes common files once."""
    found = []
    for again in (False, True):
        args = dict(bf16=True, save_strategy="steps", save_steps=1, max_steps=2, max_grad_norm=0.3)
        trainer = create(Trainer, folder, config=trainers.BUDGET.model_copy(update={"device_memory": None}), **args)
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
    averaged(f"{folder}/averaged")
    near_ddp(f"{folder}/ddp")
    resumed_by_both(f"{folder}/resumed")


def test_two_processes(tmp_path):
    run(2, run_all, folder=str(tmp_path))
