"""Losses that are computed tile by tile: `ps.functional.linear_cross_entropy` and `Config(tiled_loss=True)`."""

import copy
import pickle
import warnings

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import strategies as st
from sampling import drawn
from torch import nn

import patrickstar as ps
from patrickstar import functional, testing
from patrickstar._autograd.uncomputed_logits import UncomputedLogits
from patrickstar.errors import ConfigError, ModelError

from .test_language_models import DECODER, GPT2, T5
from .zoo import normal, small_chunks, tokens, trains

# Every version of the libraries knows these names; the newest ones deprecate them.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing(_enable)?` is deprecated:FutureWarning")

VOCABULARY = 64
LENGTH = 24
DECODER = DECODER | dict(pad_token_id=0, bos_token_id=0, eos_token_id=0)
DROPOUT = dict(embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1)
MODELS = {
    "gpt2": (transformers.GPT2LMHeadModel, GPT2 | dict(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)),
    "dropout": (transformers.GPT2LMHeadModel, GPT2 | DROPOUT),
    "llama": (transformers.LlamaForCausalLM, DECODER),
    "soft cap": (transformers.Gemma2ForCausalLM, DECODER | dict(head_dim=8)),
    "factor": (transformers.CohereForCausalLM, DECODER),
    "divisor": (transformers.GraniteForCausalLM, DECODER | dict(logits_scaling=3.0)),
    "t5": (transformers.T5ForConditionalGeneration, T5),
}
models = st.sampled_from([name for name in MODELS if name != "dropout"])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Let a batch of tests have several tiles, of several blocks of rows each."""
    monkeypatch.setattr(functional, "ROW_ALIGNMENT", 4)
    monkeypatch.setattr(functional, "TILE_BYTES", 20 * VOCABULARY * 4)
    monkeypatch.setattr(functional, "BLOCK_BYTES", 7 * VOCABULARY * 4)


def build(name, checkpointing="off"):
    model_class, shape = MODELS[name]
    model = model_class(model_class.config_class(**shape)).train()
    if checkpointing != "off":
        model.config.use_cache = False
        options = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def batches(count=3):
    """Return batches of several tiles, with labels that do not count."""
    found = []
    for step in range(count):
        ids = tokens(VOCABULARY, 2, LENGTH, seed=step)
        found.append({"input_ids": ids, "labels": torch.where(ids < 6, -100, ids)})
    return found


def tiled(config):
    return config.model_copy(update={"tiled_loss": True})


def untiled(hidden, weight, labels, bias, *, shift, denominator, z_loss, scale, softcap, reduction, label_smoothing):
    """Return the loss in plain PyTorch, with all logits."""
    logits = F.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32)) * scale
    logits = logits if softcap is None else (logits / softcap).tanh() * softcap
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:] if shift else labels
    logits, labels = logits.flatten(0, -2), labels.flatten()
    count = (labels != -100).sum()
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    loss = loss + z_loss * (logits.logsumexp(1).square() * (labels != -100)).sum()
    return loss / (denominator or (count if reduction == "mean" else 1))


options = st.fixed_dictionaries(
    {
        "shift": st.booleans(),
        "denominator": st.sampled_from([None, 7.0, torch.tensor(30)]),
        "z_loss": st.sampled_from([0.0, 0.01]),
        "scale": st.sampled_from([1.0, 0.25]),
        "softcap": st.sampled_from([None, 2.0]),
        "reduction": st.sampled_from(["mean", "sum"]),
        "label_smoothing": st.sampled_from([0.0, 0.1]),
    }
)


@drawn(60, options, st.integers(0, 45), st.booleans(), st.integers(0, 1000))
def test_the_loss_and_gradients_are_those_of_all_logits(kwargs, length, with_bias, seed):
    hidden = normal(2, length, 8, seed=seed).double().requires_grad_()
    weight = normal(VOCABULARY, 8, seed=seed + 1).double().requires_grad_()
    bias = normal(VOCABULARY, seed=seed + 2).double().requires_grad_() if with_bias else None
    labels = tokens(VOCABULARY, 2, length, seed=seed)
    labels = torch.where(labels < 9, -100, labels)
    operands = [each for each in (hidden, weight, bias) if each is not None]
    found = ps.functional.linear_cross_entropy(hidden, weight, labels, bias, **kwargs)
    expected = untiled(hidden, weight, labels, bias, **kwargs)
    torch.testing.assert_close(found, expected, equal_nan=True)
    gradients = torch.autograd.grad(found * 3, operands), torch.autograd.grad(expected * 3, operands)
    torch.testing.assert_close(*gradients, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_many_tiles_stay_accurate_in_16_bits(dtype):
    """Gradients divided by the number of tokens are below the smallest fp16: they must not be lost."""
    count = 30_000
    hidden, weight = normal(count, 8).to(dtype).requires_grad_(), normal(VOCABULARY, 8).to(dtype).requires_grad_()
    labels = tokens(VOCABULARY, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "TILE_BYTES", 3000 * VOCABULARY * 2)
        # Loss scaling makes fp16 gradients large enough, as in training.
        loss = ps.functional.linear_cross_entropy(hidden, weight, labels) * 1024
    found = torch.autograd.grad(loss, (hidden, weight))
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*wide), labels) * 1024, wide)
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= 0.01 * other.norm()


def test_a_frozen_operand_gets_no_gradient_and_no_grad_needs_none():
    hidden, weight = normal(30, 8).requires_grad_(), normal(VOCABULARY, 8)
    loss = ps.functional.linear_cross_entropy(hidden, weight, tokens(VOCABULARY, 30))
    loss.backward()
    assert weight.grad is None and hidden.grad is not None
    with torch.no_grad():
        assert not ps.functional.linear_cross_entropy(hidden, weight, tokens(VOCABULARY, 30)).requires_grad


def test_autocast_computes_products_in_its_dtype():
    hidden, weight = normal(30, 8).requires_grad_(), normal(VOCABULARY, 8).requires_grad_()
    labels = tokens(VOCABULARY, 30)
    with torch.autocast("cpu", torch.bfloat16):
        found = ps.functional.linear_cross_entropy(hidden, weight, labels)
    expected = ps.functional.linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in (found, expected)]
    testing.assert_same_bits(*gradients, "gradients")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(weight=normal(VOCABULARY, 9)), "last dimensions"),
        (dict(labels=tokens(VOCABULARY, 29)), "labels need the shape"),
        (dict(labels=normal(30)), "labels are torch.float32"),
        (dict(bias=normal(3)), "bias has shape"),
        (dict(weight=normal(VOCABULARY, 8).bfloat16()), "weight torch.bfloat16"),
        (dict(reduction="none"), "neither 'mean' nor 'sum'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    given = dict(hidden=normal(30, 8), weight=normal(VOCABULARY, 8), labels=tokens(VOCABULARY, 30))
    with pytest.raises(ModelError, match=message):
        ps.functional.linear_cross_entropy(**given | arguments)


def test_a_second_backward_raises():
    hidden = normal(30, 8).requires_grad_()
    loss = ps.functional.linear_cross_entropy(hidden, normal(VOCABULARY, 8), tokens(VOCABULARY, 30))
    loss.backward(retain_graph=True)
    with pytest.raises(ModelError, match="a second time"):
        loss.backward()


# Models


class Head(nn.Module):
    """Language model whose loss the user computes, tied or not, with a bias or not."""

    def __init__(self, tied, bias):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(8, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        hidden = self.body(self.words(ids))
        return ps.functional.linear_cross_entropy(
            hidden, self.head.weight, ids, self.head.bias, shift=True, z_loss=1e-3
        )


@drawn(
    50, st.booleans(), st.booleans(), st.sampled_from(["fp32", "bf16", "fp16"]), st.integers(1, 3), st.integers(0, 99)
)
def test_a_loss_in_the_users_code_is_exact(tied, bias, precision, accumulation, seed):
    data = [(tokens(VOCABULARY, 2, LENGTH, seed=step),) for step in range(4)]
    config = small_chunks(precision)
    testing.assert_exact(lambda: Head(tied, bias), data, config, accumulation=accumulation, max_norm=0.5, seed=seed)


@drawn(
    200,
    models,
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.sampled_from(["off", "reentrant", "non-reentrant"]),
    st.sampled_from([1024, 4096]),
    st.integers(1, 2),
    st.booleans(),
    st.integers(0, 1000),
    fast=14,
)
def test_tiled_losses_of_models_are_exact(name, precision, checkpointing, chunk_bytes, accumulation, stress, seed):
    config = tiled(small_chunks(precision, chunk_bytes=chunk_bytes))
    options = dict(accumulation=accumulation, stress=stress, seed=seed)
    testing.assert_exact(lambda: build(name, checkpointing), batches(), config, **options)


@drawn(50, st.sampled_from(["fp32", "bf16"]), st.sampled_from(["off", "non-reentrant"]), st.integers(0, 1000))
def test_tiled_losses_are_exact_with_dropout(precision, checkpointing, seed):
    config = tiled(small_chunks(precision))
    testing.assert_exact(lambda: build("dropout", checkpointing), batches(), config, seed=seed)


@pytest.mark.parametrize("name", MODELS)
def test_a_tiled_loss_is_the_models_own_up_to_rounding(name):
    """The model's code between layer and loss is followed: shapes, factors, soft caps."""
    torch.manual_seed(0)
    model, batch = build(name), batches(1)[0]
    torch.manual_seed(1)
    expected = model(**batch)
    with ps.Engine(model, tiled(small_chunks("fp32"))) as engine:
        torch.manual_seed(1)
        found = engine(**batch)
        assert "_LinearCrossEntropy" in type(found.loss.grad_fn).__name__ and type(found.logits) is UncomputedLogits
        torch.testing.assert_close(found.loss, expected.loss)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(found.logits, expected.logits)
        assert found.logits.shape == expected.logits.shape and found.logits.requires_grad


def test_reading_logits_while_gradients_are_recorded_is_said_once(config):
    with ps.Engine(build("llama"), tiled(config)) as engine:
        out = engine(**batches(1)[0])
        with pytest.warns(UserWarning, match=r"square reads the logits, so .*KiB"):
            extra = out.logits.square().mean()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out.logits.sum()
        engine.backward(out.loss + extra)


@trains(lambda: build("llama"), tiled(small_chunks("bf16")))
@pytest.mark.filterwarnings("ignore:tiled_loss=True")
def test_reading_logits_is_exact(trainer, optimizer):
    for batch in batches():
        out = trainer(**batch)
        loss = (
            out.loss
            + 0.1 * out.logits.float().square().mean()
            + F.cross_entropy(out.logits[0, 1:, :9], batch["labels"][0, 1:] % 9)
        )
        trainer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


@trains(lambda: build("llama"), tiled(small_chunks("bf16")))
def test_evaluation_and_generation_are_exact(trainer, optimizer):
    for batch in batches(2):
        out = trainer(**batch)
        trainer.backward(out.loss)
        optimizer.step()
        optimizer.zero_grad()
        trainer.module.eval()
        with torch.no_grad():
            yield trainer.module.generate(tokens(VOCABULARY, 1, 3), max_new_tokens=4, do_sample=False)
            yield trainer(**batch).loss
            yield trainer(**batch).logits[:, -1].float().sum(0)
        trainer.module.train()


def test_logits_that_backward_or_a_step_has_made_unreadable_are_refused(config):
    with ps.Engine(build("llama"), tiled(config)) as engine:
        out = engine(**batches(1)[0])
        engine.backward(out.loss)
        engine.optimizer.step()
        with pytest.raises(ModelError, match="read outputs"):
            out.logits.sum()


def test_closing_the_engine_gives_the_models_forward_back(config):
    model = build("gpt2")
    engine = ps.Engine(model, tiled(config))
    copied, pickled = copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))
    batch = batches(1)[0]
    for other in (copied, pickled):
        assert type(other(**batch).logits) is torch.Tensor
    engine.close()
    assert type(model(**batch).logits) is torch.Tensor and "forward" not in vars(model.lm_head)


def test_native_code_gets_logits(config):
    """A custom operator sees no tensor without elements."""
    with ps.Engine(build("llama"), tiled(config)) as engine, torch.no_grad():
        logits = engine(**batches(1)[0]).logits
        assert torch.equal(torch.ops.aten.relu(logits), logits.relu())
        assert torch.equal(torch.cat([logits, logits])[2:], logits)
        assert torch.equal(torch.from_numpy(logits.float().numpy()), logits + 0.0)


@pytest.mark.parametrize("model", ["no head", "adapter on the head"])
def test_models_without_a_plain_output_layer_are_refused(config, model):
    if model == "no head":
        built, message = Head(False, False), "no language model of transformers"
    else:
        lora = peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
        built, message = peft.get_peft_model(build("llama"), lora), "the output layer is"
    with pytest.raises(ConfigError, match=message):
        ps.Engine(built, tiled(config))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_adapters_leave_the_head_frozen(precision):
    def adapted():
        lora = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
        return peft.get_peft_model(build("llama"), lora)

    testing.assert_exact(adapted, batches(), tiled(small_chunks(precision)))
