"""A share of a model's layers recomputed: `Config(activation_checkpointing=...)`."""

from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import strategies as st
from sampling import drawn
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import module

import patrickstar as ps
from patrickstar import testing
from patrickstar._autograd.recomputed_layers import find_layers
from patrickstar._autograd.selective_checkpoint import STORED
from patrickstar.errors import ConfigError

from .test_language_models import DECODER, GPT2, T5, batches
from .zoo import small_chunks

# Every version of the library knows this name; the newest one deprecates it.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")

DROPOUT = dict(embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1)
MODELS = {
    "dropout": (transformers.GPT2LMHeadModel, GPT2 | DROPOUT | dict(n_layer=4)),
    "llama": (transformers.LlamaForCausalLM, DECODER | dict(num_hidden_layers=4)),
    "t5": (transformers.T5ForConditionalGeneration, T5),
}
SHARES = [0.0, "products", 0.25, 0.5, 0.75, 1.0]


def build(name, use_cache=False):
    """Return a model without the cache of keys, which recomputed layers do not have, and with which others round."""
    model_class, shape = MODELS[name]
    model = model_class(model_class.config_class(**shape)).train()
    for each in model.modules():
        if hasattr(each, "config"):
            each.config.use_cache = use_cache
    return model


def with_share(config, share):
    return config.model_copy(update={"activation_checkpointing": share})


def flags(model):
    return [layer.gradient_checkpointing for layer in find_layers(model)]


@drawn(
    30,
    st.sampled_from(list(MODELS)),
    st.sampled_from(SHARES),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.integers(1, 2),
    st.booleans(),
    st.integers(0, 99),
)
def test_bits_are_those_of_stored_activations(name, share, precision, accumulation, tiled, seed):
    """Everything is evicted at each access, freed memory is NaN, and plain PyTorch stores all activations."""
    config = with_share(small_chunks(precision, chunk_bytes=2048), share).model_copy(update={"tiled_loss": tiled})
    testing.assert_exact(lambda: build(name), batches(), config, accumulation=accumulation, seed=seed)


@drawn(20, st.sampled_from(["dropout", "llama"]), st.sampled_from(SHARES), st.integers(0, 200), st.integers(0, 99))
def test_bits_within_a_budget(name, share, spare_kib, seed):
    """Chunks are fetched and evicted along the trace; non-model data of any share are within the budget, or refused."""
    config = small_chunks("fp32", chunk_bytes=4096)

    def run(**options):
        torch.manual_seed(seed)
        with ps.Engine(lambda: build(name), config.model_copy(update=options)) as engine:
            torch.manual_seed(seed)
            for batch in batches((8,) * 4):
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            return engine.state_dict(), engine.stats

    expected, stats = run(device_memory=64 << 20, host_memory=64 << 20)
    need = stats.total.device_peak_non_model_bytes + (40 << 10)
    budgets = {"device_memory": need + (spare_kib << 10), "host_memory": 64 << 20}
    found, _ = run(**budgets, activation_checkpointing=share)
    testing.assert_same_bits(expected, found, "parameters")


def counted_in_whole(share):
    return 0 if share == "products" else 4 * share


@pytest.mark.parametrize("share", SHARES)
def test_the_first_layers_are_recomputed_in_whole_and_the_model_is_restored(share):
    model = build("llama")
    with ps.Engine(model, with_share(small_chunks("fp32"), share)):
        assert flags(model) == [bool(share)] * 4
        selective = ["context_fn" in layer._gradient_checkpointing_func.keywords for layer in find_layers(model)]
        assert selective == [number >= counted_in_whole(share) for number in range(4)]
    assert flags(model) == [False] * 4 and "gradient_checkpointing" not in vars(model.model.layers[0])


@pytest.mark.parametrize("share", SHARES)
def test_products_run_again_in_layers_recomputed_in_whole_alone(share):
    """A layer of Llama has seven products; recomputation ends before the last one, and attention counts."""
    with Counts() as counts, ps.Engine(build("llama"), with_share(small_chunks("fp32"), share)) as engine:
        (batch,) = batches((8,))
        loss = engine(**batch).loss
        forward = counts.number
        engine.backward(loss)
        products = 2 * (7 * 4 + 1)  # gradients of inputs and weights
        again = counts.number - forward - products
    assert again == 7 * counted_in_whole(share)


class Counts(TorchDispatchMode):
    """Counts products with weights and operators of attention."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func in STORED
        return func(*args, **(kwargs or {}))


class InPlace(transformers.modeling_layers.GradientCheckpointingLayer):
    """Layer that changes what its products return."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        hidden = self.first(x)
        hidden *= 0.5
        return self.second(hidden.relu_()).add_(x)


@pytest.mark.parametrize(("offload", "rows"), [(False, 32), (True, 32), (True, 8)])
def test_a_result_that_changes_in_place_is_computed_again(offload, rows):
    """Also one that is offloaded, or too small to be."""

    def model():
        return module(lambda m, x: m.layers(x).square().mean(), layers=lambda: nn.Sequential(InPlace(), InPlace()))()

    inputs = [(torch.randn(rows, 8),) for _ in range(3)]
    config = small_chunks("fp32").model_copy(update={"activation_checkpointing": "products"})
    config = config.model_copy(update={"activation_offload": offload})
    testing.assert_exact(model, inputs, config)


@pytest.mark.parametrize("share", SHARES)
def test_a_graph_that_is_retained_is_computed_again(share):
    def gradients(options):
        torch.manual_seed(0)
        with ps.Engine(build("llama"), small_chunks("fp32").model_copy(update=options)) as engine:
            (batch,) = batches((8,))
            loss = engine(**batch).loss
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            return [param.grad.clone() for param in engine.module.parameters()]

    testing.assert_same_bits(gradients({}), gradients({"activation_checkpointing": share}), "gradients")


def test_products_are_offloaded_too():
    def run(offload):
        torch.manual_seed(0)
        options = {"activation_checkpointing": "products", "activation_offload": offload}
        with ps.Engine(build("llama"), small_chunks("fp32").model_copy(update=options)) as engine:
            engine.backward(engine(**batches((64,))[0]).loss)
            engine.optimizer.step()
            return engine.stats.total

    stored, offloaded = run(False), run(True)
    assert offloaded.device_peak_non_model_bytes < stored.device_peak_non_model_bytes
    assert offloaded.host_peak_non_model_bytes > 0 == stored.host_peak_non_model_bytes


def test_a_share_replaces_what_the_model_was_set_to():
    model = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with ps.Engine(model, small_chunks("fp32")):
        assert flags(model) == [True] * 4
    with ps.Engine(model, with_share(small_chunks("fp32"), 0.5)):
        assert flags(model) == [True] * 4
    with ps.Engine(model, with_share(small_chunks("fp32"), 0.0)):
        assert flags(model) == [False] * 4
    assert flags(model) == [True] * 4


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_recomputed_layers_add_to_no_cache(share):
    """Keys that the model stores in a cache, as is its default, are those of one forward."""
    with ps.Engine(build("dropout", use_cache=True), with_share(small_chunks("fp32"), share)) as engine:
        (batch,) = batches((8,))
        out = engine(**batch)
        engine.backward(out.loss)
        cache = out.past_key_values
        assert cache is None or {cache.get_seq_length(layer) for layer in range(4)} <= {0, 8}


def test_each_further_stored_layer_takes_its_activations():
    """Non-model data grow by the same bytes for each layer's products, so that a plan may lie on a line."""

    def peak_bytes(share):
        torch.manual_seed(0)
        config = small_chunks("fp32").model_copy(update={"device_memory": 64 << 20, "host_memory": 64 << 20})
        with ps.Engine(lambda: build("llama"), with_share(config, share)) as engine:
            for batch in batches((32, 32)):
                engine.backward(engine(**batch).loss)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            return engine.stats.total.device_peak_non_model_bytes

    peaks = [peak_bytes(share) for share in SHARES[::-1]]
    grown = [after - before for before, after in pairwise(peaks[1:-1])]
    assert peaks == sorted(peaks) and min(grown) > 0 and max(grown) - min(grown) <= max(grown) / 10


@pytest.mark.parametrize("share", [-0.1, 1.5, "half"])
def test_a_share_is_from_0_to_1(share):
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        ps.Config(activation_checkpointing=share)


def test_a_model_without_such_layers_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"Linear has no layers .* torch\.utils\.checkpoint"):
        ps.Engine(nn.Linear(2, 2), with_share(small_chunks("fp32"), 0.5))
