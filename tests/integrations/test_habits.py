"""Savers and loaders of transformers, PEFT and Lightning with managed models: full precision, or a refusal."""

import json

import lightning
import peft
import pytest
import torch
from torch import nn
from transformers import GPT2LMHeadModel

import patrickstar as ps
from patrickstar.errors import ModelError
from patrickstar.testing import assert_same_bits

from .test_lightning import trainer
from .trainers import PEFT_WARNINGS, gpt2

pytestmark = PEFT_WARNINGS


def trained(model, **options) -> ps.Engine:
    torch.manual_seed(0)
    engine, optimizer = ps.initialize(model, ps.Config(device="cpu", optimizer=ps.AdamW(lr=1e-2), **options))
    ids = torch.arange(12).view(2, 6)
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        optimizer.step()
    return engine


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_save_pretrained_of_the_module(shard, tmp_path):
    engine = trained(gpt2, precision="bf16")
    engine.module.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shard == "5GB"
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert_same_bits(engine.state_dict(), dict(loaded.state_dict()), "the loaded model")
    engine.close()
    engine.module.save_pretrained(tmp_path / "closed")
    assert_same_bits(dict(loaded.state_dict()), dict(engine.module.state_dict()), "the closed engine's model")


def test_a_state_dict_of_the_caller_keeps_its_dtype(tmp_path):
    engine = trained(gpt2, precision="bf16")
    state = {name: value.bfloat16() for name, value in engine.module.state_dict().items()}
    engine.module.save_pretrained(tmp_path, state_dict=state)
    assert GPT2LMHeadModel.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_generation_has_the_bits_of_the_plain_model():
    engine = trained(gpt2, precision="fp32")
    ids, options = torch.arange(4)[None], {"max_new_tokens": 5, "do_sample": False}
    found = [engine.generate(ids, **options), engine.module.generate(ids, **options)]
    engine.close()
    assert_same_bits([engine.module.generate(ids, **options)] * 2, found, "tokens")


def adapted() -> nn.Module:
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, target_modules=["c_attn"]))


def test_adapters_are_refused_by_the_engines_method(tmp_path):
    """Their own saves them in full precision: test_peft.py."""
    with pytest.raises(ModelError, match=r"PeftModel\w* has PEFT adapters.*engine\.module\.save_pretrained"):
        trained(adapted).save_pretrained(tmp_path / "engine")


def test_a_merged_model_loads_in_transformers(tmp_path):
    engine = trained(adapted, precision="fp32")
    engine.close()
    merged = engine.module.merge_and_unload()
    merged.save_pretrained(tmp_path)
    assert_same_bits(
        dict(merged.state_dict()), dict(GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()), "the merged model"
    )


class Untouched(lightning.LightningModule):
    """Module of Lightning's own strategy, which knows nothing of the engine that trains its layers."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
        self.config = ps.Config(device="cpu", precision=precision, optimizer=ps.AdamW(lr=1e-2))

    @property
    def engine(self) -> ps.Engine:
        return self.__dict__["made"]

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.engine(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.__dict__["made"], optimizer = ps.initialize(self.layers, self.config)
        return optimizer


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_lightning_resumes_exactly(precision, tmp_path):
    inputs = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(inputs, batch_size=None)
    whole, first, second = (Untouched(precision) for _ in range(3))
    trainer("auto", tmp_path, max_epochs=3).fit(whole, data)
    stopped = trainer("auto", tmp_path)
    stopped.fit(first, data)
    stopped.save_checkpoint(tmp_path / "one.ckpt")
    trainer("auto", tmp_path, max_epochs=3).fit(second, data, ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    states = [
        model.engine.state_dict() | {"moments": model.engine.optimizer.state_dict()["state"][0]["exp_avg"]}
        for model in (whole, second)
    ]
    assert_same_bits(*states, "the resumed run")
