"""QLoRA: the frozen base in bitsandbytes' 4-bit format lies in chunks as bytes; adapters train with the plain bits."""

import peft
import pytest
import torch
import transformers
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM

import patrickstar as ps
from patrickstar.integrations.transformers import Trainer

from .tiny import llama
from .trainers import PEFT_WARNINGS, create

pytestmark = [*PEFT_WARNINGS, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
IDS = torch.arange(16).view(2, 8)


@pytest.fixture(autouse=True)
def _no_avx512_kernels(monkeypatch):
    """On CPUs with AVX-512 plain layers use other kernels, with other bits, and fail if they are as small as here."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


def quantized(folder) -> LlamaForCausalLM:
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    return LlamaForCausalLM.from_pretrained(
        folder, quantization_config=options, dtype=torch.bfloat16, device_map={"": "cpu"}
    )


@pytest.fixture
def build(tmp_path):
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "base")

    def adapted() -> nn.Module:
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(quantized(tmp_path / "base"), lora)

    return adapted


def step(model, loss_backward, optimizer):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss_backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_training_has_the_bits_of_plain_pytorch(build):
    plain = build()
    optimizer = ps.testing.PlainOptimizer([{"params": [p for p in plain.parameters() if p.requires_grad]}], ps.AdamW())
    expected = [step(plain, torch.Tensor.backward, optimizer) for _ in range(3)]
    engine = ps.testing.stressed(build, ps.Config(device="cpu", chunk_size=4096, optimizer=ps.AdamW()))
    ps.testing.assert_same_bits(expected, [step(engine, engine.backward, engine.optimizer) for _ in range(3)], "losses")
    base = [param for param in engine.inspect().parameters if not param.trained]
    chunks = {chunk.index: chunk for chunk in engine.inspect().chunks}
    assert any(chunks[param.chunk].dtype == "uint8" for param in base), "quantized weights are stored as bytes"
    ps.testing.assert_same_bits(dict(plain.state_dict()), dict(engine.module.state_dict()), "adapters and base")
    engine.close()
    assert [type(p) for p in engine.module.parameters()] == [type(p) for p in plain.parameters()]
    assert any(type(p) is Params4bit for p in engine.module.parameters())
    ps.testing.assert_same_bits(dict(plain.state_dict()), dict(engine.module.state_dict()), "the closed engine's model")


def test_weights_are_not_packed_anew_in_evaluations(build, monkeypatch):
    """On CPUs with AVX-512 the layer replaces its weight by one of another shape when it is first evaluated."""
    layers = [module for module in build().modules() if isinstance(module, Linear4bit)]
    assert layers and all(hasattr(layer, "support_avx512bf16_for_cpu") for layer in layers)
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    engine, _ = ps.initialize(build, ps.Config(device="cpu"))
    shapes = [p.shape for p in engine.parameters()]
    with torch.no_grad():
        assert torch.isfinite(engine.eval()(input_ids=IDS).logits).all()
    assert shapes == [p.shape for p in engine.parameters()]
    engine.close()
    layer = next(module for module in engine.module.modules() if isinstance(module, Linear4bit))
    assert layer.support_avx512bf16_for_cpu


def test_the_trainer_has_the_losses_of_the_stock_one(build, tmp_path):
    data = [{"input_ids": IDS[0] + i, "labels": IDS[0] + i} for i in range(6)]
    options = dict(max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=1, optim="adamw_torch")
    options["config"], losses = ps.Config(device="cpu", device_memory="2MiB", host_memory="64MiB"), []
    for kind in (transformers.Trainer, Trainer):
        trainer = create(kind, tmp_path / kind.__module__, build(), train_dataset=data, weight_decay=0.0, **options)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == 3
    trainer.save_model(tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(quantized(tmp_path / "base"), tmp_path / "adapters")
    full = trainer.engine.state_dict()
    found = {name: value for name, value in loaded.state_dict().items() if "lora" in name}
    ps.testing.assert_same_bits({name: full[name] for name in found}, found, "loaded adapters")


def test_a_quantized_model_without_adapters_is_refused(build, tmp_path):
    with pytest.raises(ValueError, match="attach trainable adapters"):
        create(Trainer, tmp_path / "run", build().unload(), ps.Config(device="cpu"))
