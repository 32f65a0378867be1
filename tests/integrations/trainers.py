"""Tiny models, data and Trainers for comparisons."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import patrickstar as ps
from patrickstar.integrations.transformers import Trainer

VOCAB = 64
ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "foreach": False})
"""AdamW without foreach, so that torch and the engine run the same operations."""
BUDGET = ps.Config(chunk_size="16KiB", device_memory="96KiB")
"""Budget for two or three of the nine chunks of these models."""
DEFAULTS = dict(use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1)
DEFAULTS |= dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2, learning_rate=1e-2)
DEFAULTS |= dict(weight_decay=0.1, warmup_steps=2, lr_scheduler_type="cosine", dataloader_pin_memory=False)
TIMES = ("runtime", "per_second", "preparation_time", "step_time")


def gpt2(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    shape = dict(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    config = GPT2Config(**shape, resid_pdrop=dropout, loss_type="ForCausalLM")
    return GPT2LMHeadModel(config)


def texts(count: int = 22, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return sequences of 16 tokens of which up to four labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for number in range(count):
        tokens = torch.randint(0, VOCAB, (16,), generator=generator)
        labels = tokens.clone()
        labels[: number % 5] = -100
        sequences.append({"input_ids": tokens, "labels": labels})
    return sequences


def arguments(folder: Any, **options: Any) -> TrainingArguments:
    return TrainingArguments(**DEFAULTS | {"output_dir": str(folder)} | options)


def checkpointing(enabled: bool) -> dict[str, Any]:
    """Return the arguments of a Trainer with or without activation checkpointing, by their names in this version."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"
    return {name: enabled} | ({f"{name}_kwargs": {"use_reentrant": False}} if enabled else {})


class Stress:
    """Makes engines that evict every unused chunk at each access and fill freed memory with NaN."""

    def make_engine(self, model: nn.Module, config: ps.Config) -> ps.Engine:
        more = {"frozen": self.frozen_modules} if hasattr(self, "frozen_modules") else {}
        return ps.Engine(model, config, meter=ps.testing.NoMeter(), evict_everything=True, poison=True, **more)


def stressed(kind: Any) -> Any:
    """Return a class of trainers, strategies or accelerators with such an engine."""
    return type("Stressed", (Stress, kind), {})


Stressed = stressed(Trainer)
PEFT_WARNINGS = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
"""PEFT's own, about GPT-2, whose layers are transposed, and about new names in transformers."""


OF_TRAINERS = {"train_dataset", "eval_dataset", "callbacks", "compute_metrics", "model_init"}
OF_TRAINERS |= {"optimizers", "optimizer_cls_and_kwargs"}


def create(kind: Any, folder: Any, model: nn.Module | None = None, config: Any = BUDGET, **options: Any) -> Any:
    """Return a Trainer, by default of the tiny GPT-2; other options are the Trainer's or those of its arguments."""
    given = {name: options.pop(name) for name in OF_TRAINERS & options.keys()}
    given |= {"config": config} if issubclass(kind, Trainer) else {}
    if model is None and "model_init" not in given:
        model = gpt2()
    return kind(model, args=arguments(folder, **options), **{"train_dataset": texts()} | given)


def trained(trainer: transformers.Trainer) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Train, close the engine if there is one, and return the log and the parameters."""
    trainer.train()
    result = logged(trainer), {name: value.clone() for name, value in weights(trainer).items()}
    close(trainer)
    return result


class Shell(torch.optim.Optimizer):
    """Adapter of the reference's optimizer to torch's Optimizer class."""

    def __init__(self, reference: ps.testing.ReferenceTrainer) -> None:
        self.reference = reference
        super().__init__([torch.zeros(1)], {})
        self.param_groups = reference.optimizer.param_groups

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.reference.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.reference.optimizer.zero_grad()

    def load_state_dict(self, state_dict: Any) -> None:
        """Do nothing; accelerate passes the optimizer's own state."""


class Protocol(transformers.Trainer):
    """Stock Trainer over ReferenceTrainer: plain tensors with the engine's precision, clipping and update rule."""

    reference_kind = ps.testing.ReferenceTrainer

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            args = self.args
            config = ps.Config(
                device="cpu",
                precision="bf16" if args.patrickstar_bf16 else "fp32",
                optimizer=ps.AdamW(lr=args.learning_rate, param_groups=self.groups),
            )
            self.reference = self.reference_kind(self.model, config)
            self.optimizer = Shell(self.reference)
        return self.optimizer

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        decayed = self.get_decay_parameter_names(model)
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        return [
            {"params": [p for n, p in named if n in decayed], "weight_decay": self.args.weight_decay},
            {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
        ]

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*args, **options)
        self.reference._collect()
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.reference.clip_grad_norm_(self.args.max_grad_norm)


def logged(trainer: transformers.Trainer) -> list[dict[str, Any]]:
    """Return the log without times."""
    return [
        {key: value for key, value in entry.items() if not key.endswith(TIMES)} for entry in trainer.state.log_history
    ]


def weights(trainer: transformers.Trainer) -> dict[str, torch.Tensor]:
    """Return the parameters in full precision."""
    if isinstance(trainer, Trainer):
        return trainer.engine.state_dict()
    if isinstance(trainer, Protocol):
        return trainer.reference.state_dict()
    return trainer.model.state_dict()


def close(trainer: transformers.Trainer) -> None:
    if isinstance(trainer, Trainer) and inspect.getattr_static(trainer, "_managed") is not None:
        trainer.engine.close(keep=False)


def same(found: Any) -> None:
    """Assert equal logs, up to norms, and bit-identical parameters of two trained Trainers."""
    (log, state), (own_log, own_state) = found
    same_but_norms(log, own_log)
    ps.testing.assert_same_bits(state, own_state, "parameters")


def same_but_norms(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> None:
    """Assert equal logs, up to gradient norms: torch adds squares in fp32, the engine in fp64."""
    assert len(expected) == len(actual)
    for record, other in zip(expected, actual, strict=True):
        assert record.keys() == other.keys()
        for key, value in record.items():
            if key == "grad_norm":
                assert abs(value - other[key]) <= 1e-6 * abs(value)
            else:
                assert value == other[key], (key, record, other)
