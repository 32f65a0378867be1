"""PEFT adapters: the base model is frozen in 16 bits; adapters are trained and saved in full precision.

Savers of transformers and PEFT with managed models: full precision, or a refusal.
"""

import json

import peft
import pytest
import torch
import transformers
from transformers import GPT2LMHeadModel

import patrickstar as ps
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar.errors import ModelError, TrainingError
from patrickstar.integrations.transformers._saved_weights import adapter_names
from patrickstar.testing import assert_same_bits

from .test_trainer_runs import StopAfter, finish_the_same
from .trainers import ADAMW, PEFT_WARNINGS, Stressed, close, create, gpt2, same, texts, trained, weights

pytestmark = PEFT_WARNINGS
SAVES = dict(save_strategy="steps", save_steps=1)


def adapted(base_dtype=torch.float32, **options):
    base = gpt2().to(base_dtype)
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1, **options)
    return peft.get_peft_model(base, config)


def trainer(folder, model, kind=Stressed, stop=None, **options):
    callbacks = [] if stop is None else [StopAfter(stop)]
    return create(kind, folder, model, eval_dataset=texts(7, seed=1), callbacks=callbacks, **options)


def adapters(state):
    return {name: value for name, value in state.items() if "lora" in name}


def test_results_are_bitwise_those_of_the_stock_trainer(tmp_path):
    found = []
    for kind in (transformers.Trainer, Stressed):
        options = dict(max_grad_norm=100.0, save_strategy="steps", save_steps=3, optimizer_cls_and_kwargs=ADAMW)
        found.append(trained(trainer(tmp_path / kind.__name__, adapted(), kind, **options)))
    same(found)
    saved = [tmp_path / name / "checkpoint-6" / "adapter_model.safetensors" for name in ("Trainer", "Stressed")]
    assert saved[0].read_bytes() == saved[1].read_bytes()


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
def test_base_model_is_frozen_in_16_bits(tmp_path, base_dtype):
    """An fp32 base is cast, and adapters compute in bf16; with a bf16 base PEFT makes adapters compute in fp32."""
    one = trainer(tmp_path, adapted(base_dtype), bf16=True)
    expected = {name: value.bfloat16() for name, value in gpt2().state_dict().items()}
    before = adapters(one.model.state_dict())
    one.train()
    computed = {param.dtype for param in one.model.parameters() if param.requires_grad}
    assert computed == {torch.bfloat16 if base_dtype == torch.float32 else torch.float32}
    state = weights(one)
    base = {
        name.removeprefix("base_model.model.").replace("base_layer.", ""): value
        for name, value in state.items()
        if "lora" not in name
    }
    assert_same_bits(expected, base, "the base model")
    assert {value.dtype for value in adapters(state).values()} == {torch.float32}
    assert any(not torch.equal(before[name], value) for name, value in adapters(state).items())
    # A frozen parameter has no master parameter and no optimizer states.
    assert sum(group.numel() for group in one.model.parameters() if group.requires_grad) < 3000
    state = one.engine.inspect()
    frozen = {param.chunk for param in state.parameters if not param.trained}
    assert frozen and {chunk.kind for chunk in state.chunks if chunk.index in frozen} == {"param16"}


def test_resumed_run_is_bitwise_equal(tmp_path):
    """Checkpoints contain adapters and nothing of the base model."""
    options = dict(bf16=True, max_grad_norm=0.05) | SAVES
    whole = trainer(tmp_path / "whole", adapted(), **options)
    whole.train()
    first = trainer(tmp_path / "parts", adapted(), stop=4, **options)
    first.train()
    close(first)
    folder = tmp_path / "parts" / "checkpoint-4"
    assert not (folder / "model.safetensors").exists()
    tensors = CheckpointReader(folder / "patrickstar").manifest.tensors
    stored = [name for name in tensors if name.startswith(("model.", "optim."))]
    assert stored and all("lora" in name for name in stored)
    second = trainer(tmp_path / "parts", adapted(), **options)
    second.train(resume_from_checkpoint=True)
    finish_the_same(whole, second)


def test_peft_loads_saved_adapters(tmp_path):
    """Includes a fully trained norm and an inactive second adapter."""
    model = adapted(modules_to_save=["ln_f"])
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["c_proj"], init_lora_weights=False))
    one = trainer(tmp_path, model, bf16=True)
    one.train()
    state = weights(one)
    one.save_model()
    one.model.save_pretrained(tmp_path / "own")
    for folder in (tmp_path, tmp_path / "own"):
        loaded = peft.PeftModel.from_pretrained(gpt2(), folder)
        loaded.load_adapter(folder / "other", "other")
        found = loaded.state_dict()
        names = [name for adapter in adapter_names(one.model).values() for name in adapter.values()]
        assert any("ln_f" in name for name in names) and any(".other." in name for name in names)
        assert_same_bits({name: state[name].float() for name in names}, {name: found[name] for name in names}, "saved")


def prompted(kind=peft.PromptTuningConfig):
    torch.manual_seed(0)
    return peft.get_peft_model(gpt2(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))


@pytest.mark.parametrize("build", [adapted, prompted])
def test_the_best_is_loaded(tmp_path, build):
    options = dict(eval_strategy="steps", eval_steps=1, save_only_model=True, load_best_model_at_end=True) | SAVES
    one = trainer(tmp_path, build(), bf16=True, learning_rate=0.3, **options)
    one.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in one.state.log_history if "eval_loss" in entry}
    assert one.evaluate()["eval_loss"] == losses[one.state.best_global_step] == min(losses.values())


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig, peft.PromptEncoderConfig])
def test_prompts_are_saved_as_by_the_stock_trainer(tmp_path, kind):
    """A prompt is what its encoder returns for masters; PEFT loads it from the file."""
    files = []
    for trainer_kind in (transformers.Trainer, Stressed):
        folder, options = tmp_path / trainer_kind.__name__, dict(save_strategy="steps", save_steps=3)
        trained(trainer(folder, prompted(kind), trainer_kind, optimizer_cls_and_kwargs=ADAMW, **options))
        files.append((folder / "checkpoint-6" / "adapter_model.safetensors").read_bytes())
        prompt = peft.PeftModel.from_pretrained(gpt2(), folder / "checkpoint-6").prompt_encoder["default"]
        assert prompt.embedding.weight.dtype == torch.float32
    assert files[0] == files[1]


def test_a_merge_into_the_base_of_the_file_loses_nothing(tmp_path, caplog):
    """The two merges of docs/peft.md: into the base that `close` returned, and into the base that was loaded."""
    torch.manual_seed(0)
    base = gpt2()
    base.save_pretrained(tmp_path / "base")
    name = "transformer.h.0.attn.c_attn.weight"
    before = base.get_parameter(name).detach().clone()
    assert before.dtype == torch.float32
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["c_attn"]))
    one = trainer(tmp_path / "run", model, bf16=True, learning_rate=1e-4)
    one.train()
    one.save_model(tmp_path / "adapters")
    one.engine.close()
    assert "frozen parameters" in caplog.text and "PeftModel.from_pretrained(base, adapters)" in caplog.text
    saved = peft.utils.load_peft_weights(tmp_path / "adapters", device="cpu")
    a, b = (saved[f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"] for part in "AB")
    delta = model.peft_config["default"].lora_alpha / 4 * (b @ a).T
    assert a.dtype == torch.float32 and delta.norm() > 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merged = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapters").merge_and_unload()
    assert_same_bits([before + delta], [merged.get_parameter(name).detach()], "merged into the loaded base")
    rounded = model.merge_and_unload().get_parameter(name).detach()
    assert rounded.dtype == torch.bfloat16
    assert (rounded - (before + delta)).norm() > 0.1 * delta.norm()


def adaptive():
    config = peft.AdaLoraConfig(target_modules=["c_attn"], total_step=8, tinit=1, tfinal=2, init_r=4, target_r=2)
    return peft.get_peft_model(gpt2(), config)


def test_adalora_reallocates_ranks_with_copies_of_the_gradients_and_refuses_without():
    """The loop of docs/peft.md, beside peft's own in plain PyTorch."""
    ids = torch.arange(16).reshape(2, 8)
    options = ps.Config(device="cpu", precision="fp32", chunk_size=512, optimizer=ps.AdamW(lr=1e-2))
    torch.manual_seed(0)
    plain = adaptive()
    optimizer = ps.testing.PlainOptimizer([{"params": [*plain.parameters()]}], options.optimizer)
    for step in range(8):
        plain(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        plain.base_model.update_and_allocate(step)
        optimizer.zero_grad()
    torch.manual_seed(0)
    engine = ps.testing.stressed(adaptive, options)
    model = engine.module
    for step in range(8):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        gradients = {param: param.grad.clone() for param in model.parameters() if param.grad is not None}
        engine.optimizer.step()
        if not step:
            with pytest.raises(TrainingError, match=r"gradient of '.*lora_.*', which optimizer.step.* has used up"):
                model.base_model.update_and_allocate(step)
        for param, gradient in gradients.items():
            param.grad = gradient
        model.base_model.update_and_allocate(step)
        engine.optimizer.zero_grad()
    assert_same_bits(dict(plain.state_dict()), engine.state_dict(), "parameters")
    ranks = [each.peft_config["default"].rank_pattern for each in (plain, model)]
    assert ranks[0] == ranks[1]
    engine.close()


# Savers


def engine_of(build, precision: str) -> ps.Engine:
    torch.manual_seed(0)
    engine, optimizer = ps.initialize(build, ps.Config(device="cpu", optimizer=ps.AdamW(lr=1e-2), precision=precision))
    ids = torch.arange(12).view(2, 6)
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        optimizer.step()
    return engine


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_save_pretrained_of_the_module(shard, tmp_path):
    engine = engine_of(gpt2, "bf16")
    engine.module.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shard == "5GB"
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert_same_bits(engine.state_dict(), dict(loaded.state_dict()), "the loaded model")
    engine.close()
    engine.module.save_pretrained(tmp_path / "closed")
    assert_same_bits(dict(loaded.state_dict()), dict(engine.module.state_dict()), "the closed engine's model")


def test_a_state_dict_of_the_caller_keeps_its_dtype(tmp_path):
    engine = engine_of(gpt2, "bf16")
    state = {name: value.bfloat16() for name, value in engine.module.state_dict().items()}
    engine.module.save_pretrained(tmp_path, state_dict=state)
    assert GPT2LMHeadModel.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_generation_has_the_bits_of_the_plain_model():
    engine = engine_of(gpt2, "fp32")
    ids, options = torch.arange(4)[None], {"max_new_tokens": 5, "do_sample": False}
    found = [engine.generate(ids, **options), engine.module.generate(ids, **options)]
    engine.close()
    assert_same_bits([engine.module.generate(ids, **options)] * 2, found, "tokens")


def test_adapters_are_refused_by_the_engines_method(tmp_path):
    with pytest.raises(ModelError, match=r"PeftModel\w* has PEFT adapters.*engine\.module\.save_pretrained"):
        engine_of(adapted, "bf16").save_pretrained(tmp_path / "engine")


def test_a_merged_model_loads_in_transformers(tmp_path):
    engine = engine_of(adapted, "fp32")
    engine.close()
    merged = engine.module.merge_and_unload()
    merged.save_pretrained(tmp_path)
    assert_same_bits(
        dict(merged.state_dict()), dict(GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()), "the merged model"
    )
