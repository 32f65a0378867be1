"""Trainer: results equal those of transformers' Trainer, bitwise where the arithmetic is the same."""

import gc

import numpy as np
import pytest
import torch
import transformers
from probes import loss_scaler_of
from sampling import nightly
from transformers import BertConfig, BertForSequenceClassification, GPT2LMHeadModel, TrainerCallback

import patrickstar as ps
from patrickstar.errors import BudgetError, ConfigError, ModelError, TrainingError
from patrickstar.integrations.transformers import Trainer

from . import trainers
from .trainers import ADAMW, Stressed, close, create, gpt2, same, texts, trained, weights

KINDS = transformers.Trainer, Stressed
SGD = (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "foreach": False})


class OwnLoss:
    """User-defined `compute_loss`."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(input_ids=inputs["input_ids"])
        assert model.config.vocab_size == trainers.VOCAB
        labels = inputs["input_ids"][:, 1:].reshape(-1)
        loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].reshape(-1, trainers.VOCAB), labels)
        return (loss, out) if return_outputs else loss


FEWER_STEPS = {} if nightly() else {"max_steps": 4}  # one in the second epoch
CASES = {
    "evaluation": dict(eval_strategy="steps", eval_steps=2),
    "one batch at a time": dict(gradient_accumulation_steps=1, max_steps=4),
    "checkpointed": trainers.checkpointing(True),
    "smoothed labels": dict(label_smoothing_factor=0.1, eval_strategy="epoch"),
    "best": dict(load_best_model_at_end=True, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1),
    "no clipping": dict(max_grad_norm=0.0, lr_scheduler_type="constant"),
    "noisy embeddings": dict(neftune_noise_alpha=5.0),
    "SGD": dict(),
    "Adafactor": dict(optim="adafactor"),
    "own loss": dict(),
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_bitwise_those_of_the_stock_trainer(tmp_path, case):
    found = []
    if case == "Adafactor":
        given = {"config": ps.Config(chunk_size="16KiB", device_memory="256KiB")}  # whole parameters are updated
    else:
        given = {"optimizer_cls_and_kwargs": SGD if case == "SGD" else ADAMW}
    for kind in KINDS:
        folder = tmp_path / kind.__name__
        kind = type("Own", (OwnLoss, kind), {}) if case == "own loss" else kind
        options = dict(max_grad_norm=100.0) | FEWER_STEPS | CASES[case] | given
        trainer = create(kind, folder, eval_dataset=texts(7, seed=1), **options)
        out = trainer.train()
        predicted, best = trainer.predict(texts(5, seed=2)), trainer.state.best_global_step
        found.append((trainers.logged(trainer), weights(trainer), predicted, out.training_loss, best))
        close(trainer)
    same([each[:2] for each in found])
    (_, _, predicted, *rest), (_, _, own_predicted, *own_rest) = found
    assert np.array_equal(predicted.predictions, own_predicted.predictions)
    assert predicted.metrics["test_loss"] == own_predicted.metrics["test_loss"]
    assert rest == own_rest


@pytest.mark.filterwarnings("error:tiled_loss=True")
def test_a_tiled_loss_gives_losses_and_predictions_of_the_stock_trainer(tmp_path):
    """Nothing but predictions reads logits."""
    found = []
    tiled = ps.Config(**trainers.BUDGET.model_dump(include=trainers.BUDGET.model_fields_set), tiled_loss=True)
    for kind, config in zip(KINDS, (None, tiled), strict=True):
        options = dict(eval_dataset=texts(7, seed=1), eval_strategy="epoch", optimizer_cls_and_kwargs=ADAMW)
        trainer = create(kind, tmp_path, gpt2(0.0), config, max_grad_norm=100.0, **options)
        trainer.train()
        losses = [entry[key] for entry in trainers.logged(trainer) for key in ("loss", "eval_loss") if key in entry]
        found.append((losses, trainer.predict(texts(5, seed=2))))
        close(trainer)
    (losses, predicted), (own_losses, own_predicted) = found
    assert losses and np.allclose(losses, own_losses, rtol=1e-4)
    assert np.allclose(predicted.predictions, own_predicted.predictions, atol=1e-3)


@pytest.mark.parametrize("bf16", [False, True])
def test_results_are_bitwise_those_of_the_reference(tmp_path, bf16):
    """Compare with the stock loops over ReferenceTrainer: AdamW of this package, clipping that takes effect."""
    found = []
    for kind in (trainers.Protocol, Stressed):
        trainer = create(kind, tmp_path, bf16=bf16 and kind is Stressed, max_grad_norm=0.3, num_train_epochs=3)
        trainer.args.patrickstar_bf16 = bf16
        found.append(trained(trainer))
    (log, state), (own_log, own_state) = found
    assert log == own_log and any(entry.get("grad_norm", 0) > 0.3 for entry in log)
    ps.testing.assert_same_bits(state, own_state, "parameters")


def test_bf16_is_close_to_autocast(tmp_path):
    losses = []
    for kind in KINDS:
        log, _ = trained(create(kind, tmp_path, gpt2(0.0), ps.Config(), bf16=True, num_train_epochs=4))
        losses.append([entry["loss"] for entry in log if "loss" in entry])
    assert losses[1][-1] < losses[1][0] - 0.3
    assert all(abs(one - other) < 0.02 for one, other in zip(*losses, strict=True))


def test_token_counts_are_not_rounded(tmp_path):
    """Float tensors are inputs and cast to 16 bits, except the number that losses are divided by."""
    seen = []

    class Counting(GPT2LMHeadModel):
        def forward(self, *args, num_items_in_batch=None, **kwargs):
            seen.append(num_items_in_batch)
            return super().forward(*args, num_items_in_batch=num_items_in_batch, **kwargs)

    options = dict(per_device_train_batch_size=22, gradient_accumulation_steps=1, max_steps=1)
    trained(create(Stressed, tmp_path, Counting(gpt2().config), bf16=True, remove_unused_columns=False, **options))
    counted = sum(int((one["labels"] != -100).sum()) for one in texts())
    assert counted > 256 and float(torch.tensor(counted).bfloat16()) != counted
    assert [float(one) for one in seen] == [counted]


def test_classifier_with_metrics(tmp_path):
    """Encoder with dropout, a shorter last batch, evaluation before training, and a metric."""
    config = BertConfig(
        vocab_size=trainers.VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    data = [{"input_ids": one["input_ids"], "labels": torch.tensor(n % 2)} for n, one in enumerate(texts(18))]

    def accuracy(predicted):
        return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}

    before, found = [], []
    options = dict(max_grad_norm=100.0, eval_on_start=True, eval_strategy="epoch", optimizer_cls_and_kwargs=ADAMW)
    options |= dict(train_dataset=data, eval_dataset=data[:7], compute_metrics=accuracy)
    for kind in KINDS:
        torch.manual_seed(3)
        trainer = create(kind, tmp_path, BertForSequenceClassification(config), **options)
        before.append(trainer.evaluate()["eval_loss"])
        found.append(trained(trainer))
    assert before[0] == before[1]
    same(found)


def test_each_train_call_uses_a_new_model_of_model_init(tmp_path):
    made = []

    def build():
        made.append(gpt2())
        return made[-1]

    trainer = create(Stressed, tmp_path, model_init=build, max_steps=2)
    trainer.train()
    first = weights(trainer)
    engine = trainer.engine
    trainer.train()
    assert trainer.engine is not engine and trainer.engine.module is made[-1]
    ps.testing.assert_same_bits(first, weights(trainer), "parameters of both runs")
    with pytest.raises(TrainingError, match="closed"):
        engine.state_dict()


def test_second_train_call_continues(tmp_path):
    found = []
    for kind in KINDS:
        trainer = create(kind, tmp_path, max_steps=2, max_grad_norm=100.0, optimizer_cls_and_kwargs=ADAMW)
        trainer.train()
        found.append(trained(trainer)[1])
    ps.testing.assert_same_bits(*found, "parameters")


def test_callbacks_see_model_optimizer_and_scheduler(tmp_path):
    seen = []

    class StepRecorder(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, optimizer, lr_scheduler, **kwargs):
            seen.append((type(model), optimizer, trainer.engine.gradient("transformer.ln_f.bias").norm() > 0))

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 1

    trainer = create(Stressed, tmp_path, callbacks=[StepRecorder()])
    trainer.train()
    assert seen == [(GPT2LMHeadModel, trainer.engine.optimizer, True)]
    assert trainer.state.global_step == 1


def test_smaller_batch_is_tried(tmp_path):
    tried = []

    class Narrow(Stressed):
        def compute_loss(self, model, inputs, **options):
            tried.append(len(inputs["input_ids"]))
            if tried[-1] > 2:
                raise BudgetError("the device budget is too small for this batch")
            return super().compute_loss(model, inputs, **options)

    options = dict(max_steps=2, gradient_accumulation_steps=1, per_device_train_batch_size=3)
    for find in (False, True):
        tried.clear()
        trainer = create(Narrow, tmp_path, auto_find_batch_size=find, **options)
        if not find:
            with pytest.raises(BudgetError):
                trainer.train()
        else:
            trainer.train()
            assert tried[0] == 3 and tried[-2:] == [2, 2] and trainer.state.global_step == 2
        close(trainer)


def test_fp16_overflow_skips_the_step(tmp_path):
    """A step with overflowing gradients changes neither parameters nor the learning rate."""

    class StepRecorder(TrainerCallback):
        def on_step_end(self, args, state, control, lr_scheduler, **kwargs):
            seen.append((lr_scheduler.get_last_lr()[0], trainer.engine.stats.last.overflows))

    seen = []
    options = dict(max_steps=3, gradient_accumulation_steps=1, per_device_train_batch_size=2)
    trainer = create(Stressed, tmp_path, fp16=True, train_dataset=texts(6), callbacks=[StepRecorder()], **options)
    loss_scaler_of(trainer.engine).scale = 2.0**40
    trainer.train()
    assert seen == [(0.0, 1)] * 3


def test_unsupported_arguments_are_rejected_by_name_and_config_must_not_contradict_them(tmp_path):
    for name in ("torch_compile", "bf16_full_eval", "save_on_each_node"):
        with pytest.raises(ConfigError, match=name):
            Trainer(gpt2(), trainers.arguments(tmp_path, **{name: True}), train_dataset=texts())
    args = trainers.arguments(tmp_path, bf16=True)
    precision = r"bf16, and ps\.Config selects fp32.*leave precision out"
    for config, message in (({"precision": "fp32"}, precision), ({"device": "cuda"}, "leave device out")):
        with pytest.raises(ConfigError, match=message):
            Trainer(gpt2(), args, config=ps.Config(**config)).create_optimizer()
    Trainer(gpt2(), args, config=ps.Config(precision="bf16", device="cpu")).create_optimizer()


def test_state_dict_names_are_checked():
    engine = ps.Engine(gpt2(), ps.Config(device="cpu"))
    assert list(engine.state_dict(["transformer.ln_f.bias"])) == ["transformer.ln_f.bias"]
    with pytest.raises(ModelError, match="'nothing'"):
        engine.state_dict(["nothing"])
    before = engine.state_dict()
    engine.load_state_dict({"transformer.ln_f.bias": torch.ones(32)}, strict=False)
    after = engine.state_dict()
    assert after.pop("transformer.ln_f.bias").eq(1).all() and before.pop("transformer.ln_f.bias").eq(0).all()
    ps.testing.assert_same_bits(before, after, "what was not given")
    with pytest.raises(ModelError, match="missing"):
        engine.load_state_dict({"transformer.ln_f.bias": torch.ones(32)})


def test_seq2seq_trainer_on_the_engine(tmp_path):
    class Both(Stressed, transformers.Seq2SeqTrainer):
        """Trainer whose evaluation generates with the model."""

    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False, max_steps=1
    )
    trainer = Both(gpt2(), args, train_dataset=texts(), eval_dataset=texts(3), config=trainers.BUDGET)
    trainer.train()
    tokens = texts(1)[0]["input_ids"][None]
    with torch.no_grad():
        found = trainer.model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    state = weights(trainer)
    close(trainer)
    plain = gpt2()
    plain.load_state_dict(state)
    assert torch.equal(found, plain.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0))


def test_model_remains_usable_after_the_trainer(tmp_path):
    """Deleting the Trainer closes the engine; the model is then an ordinary one in full precision, as it was saved."""
    model = gpt2()
    trainer = create(Stressed, tmp_path, model, bf16=True, max_steps=1)
    trainer.train()
    trainer.save_model()
    state = weights(trainer)
    del trainer
    gc.collect()
    ps.testing.assert_same_bits(state, model.state_dict(), "parameters")
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float32)
    ps.testing.assert_same_bits(state, loaded.state_dict(), "the loaded model")


def test_frozen_model_is_evaluated_without_optimizer_states(tmp_path):
    trainer = create(Stressed, tmp_path, gpt2().requires_grad_(False), eval_dataset=texts(5))
    plain = create(transformers.Trainer, tmp_path, eval_dataset=texts(5))
    assert trainer.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    assert not any(param.trained for param in trainer.engine.inspect().parameters)


def test_an_evaluation_ends_the_delay_of_updates(tmp_path):
    config = trainers.BUDGET.model_copy(update={"update": ps.Delayed(after=0)})
    data = dict(train_dataset=texts(8), eval_dataset=texts(5))
    trainer = create(Stressed, tmp_path, config=config, **data)
    trainer.train()
    loss, state = trainer.evaluate()["eval_loss"], weights(trainer)
    close(trainer)
    exact = create(Stressed, tmp_path, **data)
    exact.evaluate()
    exact.engine.load_state_dict(state)
    assert exact.evaluate()["eval_loss"] == loss
