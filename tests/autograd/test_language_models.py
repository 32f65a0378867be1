"""Hugging Face language models."""

import pytest
import torch
import transformers
from toys import update

from patrickstar import testing

from .zoo import small_chunks, tokens, trains

# Every version of the library knows this name; the newest one deprecates it.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")

VOCABULARY = 64


DECODER = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=VOCABULARY)
DECODER |= dict(num_attention_heads=2, num_key_value_heads=1)
T5 = dict(d_model=16, d_ff=32, d_kv=8, num_layers=2, num_heads=2, vocab_size=VOCABULARY)
T5 |= dict(decoder_start_token_id=0, pad_token_id=0)
SPARSE = dict(num_decoder_layers=2, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)
GPT2 = dict(n_layer=2, n_embd=16, n_head=2, n_positions=32, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)
MODELS = {
    "gpt2": (transformers.GPT2LMHeadModel, GPT2),
    "llama": (transformers.LlamaForCausalLM, DECODER),
    "mixtral": (transformers.MixtralForCausalLM, DECODER | dict(num_local_experts=4, output_router_logits=True)),
    "t5": (transformers.T5ForConditionalGeneration, T5),
    # Its routers cast their own classifier to fp32 in their forward.
    "switch": (transformers.SwitchTransformersForConditionalGeneration, T5 | SPARSE),
}
WITHOUT_CASTS = [name for name in MODELS if name != "switch"]
"""Models that do not call `Module.to`, which reads `.grad`; gradients in chunks can't be read so."""


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture
def config(precision):
    return small_chunks(precision, chunk_bytes=2048)


def build(name, checkpointing="off"):
    model_class, shape = MODELS[name]
    model = model_class(model_class.config_class(**shape)).train()
    model.generation_config.pad_token_id = 0
    if checkpointing != "off":
        use_reentrant = checkpointing == "reentrant"
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return model


def batches(lengths=(8, 8, 8)):
    inputs = [tokens(VOCABULARY, 2, length, seed=step) for step, length in enumerate(lengths)]
    return [{"input_ids": ids, "labels": ids} for ids in inputs]


def generate(trainer):
    trainer.module.eval()
    with torch.no_grad():
        generated = trainer.module.generate(tokens(VOCABULARY, 1, 3), max_new_tokens=2, do_sample=False)
    trainer.module.train()
    return generated


def test_training_with_several_lengths(name, config, recomputing):
    testing.assert_exact(lambda: build(name, recomputing), batches([8, 8, 3, 12]), config)


@pytest.mark.parametrize("name", WITHOUT_CASTS)
def test_accumulation_and_clipping(name, config):
    testing.assert_exact(lambda: build(name, "non-reentrant"), batches(), config, accumulation=2, max_norm=0.1)


@pytest.mark.parametrize("name", WITHOUT_CASTS)
@trains(build)
def test_generating_at_any_time(trainer, optimizer):
    """Generate before the first step, between backward and step, and between steps."""
    yield generate(trainer)
    for batch in batches():
        loss = trainer(**batch).loss
        trainer.backward(loss)
        yield from (loss.detach(), generate(trainer))
        optimizer.step()
        optimizer.zero_grad()
        yield generate(trainer)


@trains(build)
def test_evaluation_without_grad_between_steps(trainer, optimizer):
    for batch in batches():
        with torch.no_grad():
            logits = trainer(**batch).logits.clone()
        yield logits
        update(trainer, trainer(**batch).loss)


@trains(lambda: build("gpt2"))
def test_inputs_given_as_embeddings(trainer, optimizer):
    """Prompt tuning: the user reads the embedding's weight and passes vectors to the model."""
    for batch in batches():
        vectors = trainer.module.get_input_embeddings()(batch["input_ids"])
        yield update(trainer, trainer(inputs_embeds=vectors, labels=batch["labels"]).loss)
