"""TRL's trainers: results equal those of TRL's own, and reference models lie within the budgets."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from sampling import nightly
from transformers import LlamaForSequenceClassification

import patrickstar as ps
from patrickstar.integrations.transformers import Trainer
from patrickstar.integrations.trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer

from . import tiny
from .trainers import DEFAULTS, checkpointing, close, same, stressed, trained, weights

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning")

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0, foreach=False)
"""AdamW of torch, one operation at a time: TRL's own trainers run the same operations."""
OPTIONS = ps.Config(chunk_size="16KiB", device_memory="96KiB", optimizer=ADAMW)


def llama(seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    return tiny.llama(**tiny.OF_WORDS | options)


def texts(count: int = 20) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [
        "".join(tiny.WORDS[3 + number] for number in torch.randint(0, 36, (length,), generator=generator).tolist())
        for length in lengths
    ]


def pairs() -> list[dict[str, str]]:
    written = texts(60)
    triples = zip(written[::3], written[1::3], written[2::3], strict=True)
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in triples]


def arguments(kind: Any, folder: Path, **options: Any) -> Any:
    defaults = DEFAULTS | dict(output_dir=str(folder), bf16=False, per_device_train_batch_size=2, weight_decay=0.0)
    defaults |= dict(max_steps=20 if nightly() else 6, optim="adamw_torch", max_grad_norm=100.0, **checkpointing(False))
    return kind(**defaults | options)


def of(kind: Any, model: Any, args: Any, data: list[Any], **given: Any) -> Any:
    """Return a trainer of TRL, or of this package with a small budget."""
    given |= {"config": OPTIONS} if issubclass(kind, Trainer) and "config" not in given else {}
    return kind(model, args=args, train_dataset=Dataset.from_list(data), processing_class=tiny.letters(), **given)


def sft(kind: Any, folder: Path) -> Any:
    return of(kind, llama(), arguments(trl.SFTConfig, folder, max_length=16), [{"text": text} for text in texts()])


def dpo(kind: Any, folder: Path, **options: Any) -> Any:
    options = {"max_length": 32} | options
    return of(kind, llama(), arguments(trl.DPOConfig, folder, **options), pairs(), ref_model=llama(2))


def dpo_of_a_folder(kind: Any, folder: Path) -> Any:
    """Load the model, and its reference, from a folder."""
    llama().save_pretrained(folder / "model")
    return of(kind, str(folder / "model"), arguments(trl.DPOConfig, folder, max_length=32), pairs())


def dpo_synchronized(kind: Any, folder: Path) -> Any:
    return dpo(kind, folder, sync_ref_model=True, ref_model_sync_steps=2, max_steps=6)


def dpo_of_adapters(kind: Any, folder: Path) -> Any:
    """Train adapters that are their own reference."""
    torch.manual_seed(3)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = arguments(trl.DPOConfig, folder, max_length=32, max_steps=4)
    trainer = of(kind, llama(), args, pairs(), peft_config=adapters)
    assert not (issubclass(kind, Trainer) and trainer.frozen_modules)
    return trainer


def kto(kind: Any, folder: Path) -> Any:
    data = [
        {"prompt": each["prompt"], "completion": each["chosen"], "label": number % 2 == 0}
        for number, each in enumerate(pairs())
    ]
    args = arguments(trl.KTOConfig, folder, max_length=32, max_steps=4)
    return of(kind, llama(), args, data, ref_model=llama(2))


def rewards(kind: Any, folder: Path) -> Any:
    model = llama(1, kind=LlamaForSequenceClassification, num_labels=1)
    return of(kind, model, arguments(trl.RewardConfig, folder, max_length=32, max_steps=4), pairs())


@pytest.mark.parametrize(
    ("method", "own", "kind"),
    [
        (sft, trl.SFTTrainer, SFTTrainer),
        (dpo, trl.DPOTrainer, DPOTrainer),
        pytest.param(dpo_of_a_folder, trl.DPOTrainer, DPOTrainer, marks=pytest.mark.slow),
        pytest.param(dpo_synchronized, trl.DPOTrainer, DPOTrainer, marks=pytest.mark.slow),
        pytest.param(dpo_of_adapters, trl.DPOTrainer, DPOTrainer, marks=pytest.mark.slow),
        pytest.param(kto, trl.KTOTrainer, KTOTrainer, marks=pytest.mark.slow),
        pytest.param(rewards, trl.RewardTrainer, RewardTrainer, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.__name__,
)
def test_a_method_has_the_bits_of_trl(tmp_path, method, own, kind):
    same([trained(method(each, tmp_path)) for each in (own, stressed(kind))])


def test_the_reference_model_lies_within_the_budgets(tmp_path):
    reference = llama(2)
    numel, small = sum(param.numel() for param in reference.parameters()), ps.Config(device_memory="8MiB")
    args = arguments(trl.DPOConfig, tmp_path, bf16=True, max_length=32, max_steps=3)
    trainer = of(DPOTrainer, llama(), args, pairs(), ref_model=reference, config=small)
    trainer.train()
    parameters = [each for each in trainer.engine.inspect().parameters if each.name.startswith("frozen_0.")]
    assert sum(each.numel for each in parameters) == numel and {each.dtype for each in parameters} == {"bfloat16"}
    assert not any(each.trained for each in parameters)
    assert trainer.engine.stats.total.device_peak_model_bytes <= trainer.engine.device_budget_bytes
    assert not any(name.startswith("frozen_0") for name in trainer.engine.state_dict())
    assert trainer.ref_model.config is reference.config
    assert trainer.accelerator.unwrap_model(trainer.ref_model) is reference
    with pytest.raises(ps.errors.ConfigError, match="was prepared after the engine was created"):
        trainer.accelerator.prepare_model(llama(3), evaluation_mode=True)


def length(completions: list[str], **given: Any) -> list[float]:
    """Return a reward for short completions."""
    return [-float(len(completion)) for completion in completions]


@pytest.mark.parametrize(
    ("own", "kind", "rewards"),
    [
        pytest.param(trl.GRPOTrainer, GRPOTrainer, "function", marks=pytest.mark.slow),
        (trl.GRPOTrainer, GRPOTrainer, "model"),
        (trl.RLOOTrainer, RLOOTrainer, "function"),
        pytest.param(trl.RLOOTrainer, RLOOTrainer, "model", marks=pytest.mark.slow),
    ],
)
def test_online_methods_have_the_bits_of_trl(tmp_path, own, kind, rewards):
    """Generate, score and train, with a reference and in some cases a reward model in the engine."""
    llama().save_pretrained(tmp_path / "model")
    found = []
    for each in (own, stressed(kind)):
        options = dict(max_completion_length=6, num_generations=2, beta=0.1, max_steps=4)
        args = arguments(trl.GRPOConfig if own is trl.GRPOTrainer else trl.RLOOConfig, tmp_path, **options)
        judge = llama(3, kind=LlamaForSequenceClassification, num_labels=1) if rewards == "model" else None
        given = {"reward_processing_classes": tiny.letters()} if judge else {}
        data = [{"prompt": text} for text in texts(8)]
        torch.manual_seed(5)
        found.append(trained(of(each, str(tmp_path / "model"), args, data, reward_funcs=judge or length, **given)))
    same(found)


def test_dpo_resumes_with_the_same_bits(tmp_path):
    found = []
    for steps in (4, 8):
        trainer = dpo(stressed(DPOTrainer), tmp_path, max_steps=8, save_strategy="steps", save_steps=4)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4") if steps == 8 else None)
        found.append({name: value.clone() for name, value in weights(trainer).items()})
        close(trainer)
    ps.testing.assert_same_bits(found[0], found[1], "parameters after resuming")
