"""MLPs and norms that are computed by tiles of tokens: `Config(tiled_mlp=True)`."""

import pytest
import torch
import transformers
from hypothesis import strategies as st
from sampling import drawn
from simulated_machines import LAPTOP
from torch import nn

import patrickstar as ps
from patrickstar import functional, testing
from patrickstar._autograd.tiled_rows import TiledRows, tile
from patrickstar._dry_run.simulation import forward_backward_step, simulate
from patrickstar.errors import BudgetError, ConfigError

from .test_language_models import T5, batches
from .test_recomputed_layers import SHARES, build
from .zoo import small_chunks

ROWS = 6
"""Tokens of the smallest tile."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(functional, "TILE_BYTES", 1)
    monkeypatch.setattr(functional, "ROW_ALIGNMENT", ROWS)


def tiled(config, **options):
    return config.model_copy(update={"tiled_mlp": True} | options)


@drawn(
    20,
    st.sampled_from(["dropout", "llama"]),
    st.sampled_from(SHARES),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.integers(1, 2),
    st.booleans(),
    st.integers(0, 99),
)
def test_bits_are_those_of_plain_pytorch_with_the_same_tiles(name, share, offloaded, precision, count, loss, seed):
    """Everything is evicted at each access, and freed memory is NaN. 16 tokens are three tiles, the last one of 4."""
    config = tiled(
        small_chunks(precision, chunk_bytes=2048),
        activation_checkpointing=share,
        activation_offload=offloaded,
        tiled_loss=loss,
    )
    testing.assert_exact(lambda: build(name), batches(), config, accumulation=count, seed=seed)


def losses_and_gradients(model, batch):
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_the_whole_module(dtype):
    """Forward has the same bits here, and gradients of weights are sums in another order."""
    torch.manual_seed(0)
    model, batch = build("llama").to(dtype), batches((8,))[0]
    loss, gradients = losses_and_gradients(model, batch)
    model.zero_grad()
    forwards = list(tile(model))
    assert len(forwards) == 3 * 4, "an MLP and two norms in each layer"
    for each in forwards:
        each.module.forward = each
    assert not list(tile(model)), "no module is tiled twice"
    other_loss, others = losses_and_gradients(model, batch)
    torch.testing.assert_close(other_loss, loss, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=0)
    for name, grad in gradients.items():
        difference = (others[name] - grad).float().norm()
        assert difference <= (1e-5 if dtype is torch.float32 else 1e-2) * grad.float().norm(), name


def test_rows_of_a_tile_and_more_are_divided_and_others_are_not():
    torch.manual_seed(0)
    calls = []
    layer = nn.LayerNorm(4)
    whole = layer.forward
    layer.forward = lambda input: calls.append(input.shape[0]) or whole(input)
    forward = TiledRows(layer)
    assert forward(torch.ones(ROWS, 4)).shape == (ROWS, 4) and calls == [ROWS]
    assert forward(input=torch.ones(ROWS + 1, 4)).shape == (ROWS + 1, 4) and calls[1:] == [ROWS, 1]
    calls.clear()
    out = forward(torch.arange(3 * 5 * 4.0).view(3, 5, 4))
    assert out.equal(whole(torch.arange(3 * 5 * 4.0).view(3, 5, 4))) and calls == [ROWS, ROWS, 3]


def test_tiles_have_the_width_of_the_widest_product(monkeypatch):
    monkeypatch.undo()
    model = build("llama")
    (mlp,) = {each.width for each in tile(model) if type(each.module).__name__ == "LlamaMLP"}
    (norm,) = {each.width for each in tile(model) if type(each.module).__name__ == "LlamaRMSNorm"}
    assert (mlp, norm) == (model.config.intermediate_size, model.config.hidden_size)
    assert functional.tile_rows(14336, 2) == 6912
    gpt2 = build("dropout")
    assert {each.width for each in tile(gpt2)} == {4 * gpt2.config.n_embd, gpt2.config.n_embd}


def test_memory_is_less_and_as_predicted(monkeypatch):
    """The forward is the model's own again once the engine is closed."""
    monkeypatch.setattr(functional, "ROW_ALIGNMENT", 32)
    shape = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2
    )
    ids = torch.zeros(2, 64, dtype=torch.int64)
    peaks = {}
    for tiles in (False, True):
        config = small_chunks("fp32", chunk_bytes=1 << 15).model_copy(
            update={"activation_checkpointing": 1.0, "tiled_mlp": tiles, "device_memory": 4 << 20}
        )
        model = transformers.LlamaForCausalLM(shape)
        with ps.Engine(model, config) as engine:
            for _ in range(3):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            peaks[tiles] = engine.stats.last.device_peak_non_model_bytes
        step = forward_backward_step(None, (), {"input_ids": ids, "labels": ids})
        report = simulate(ps.Engine, lambda: transformers.LlamaForCausalLM(shape), config, step, LAPTOP)
        assert abs(report.stats.device_peak_non_model_bytes - peaks[tiles]) <= 0.1 * peaks[tiles]
        assert "forward" not in vars(model.model.layers[0].mlp)
    assert peaks[True] < 0.6 * peaks[False]
    least = {"device_memory": (peaks[True] + peaks[False]) // 2 + (1 << 16), "tiled_mlp": False}
    with pytest.raises(BudgetError, match=r"this training step does not fit.*tiled_mlp=True"):
        ps.initialize(
            lambda: transformers.LlamaForCausalLM(shape),
            config.model_copy(update=least | {"host_memory": 4 << 20}),
            sample={"input_ids": ids, "labels": ids},
        )


def test_what_cannot_be_tiled_is_refused_by_name():
    with pytest.raises(ConfigError, match="tiled_mlp: Linear has no layers of transformers"):
        ps.Engine(lambda: nn.Linear(2, 2), tiled(small_chunks("fp32")))
    with pytest.raises(ConfigError, match="tiled_mlp=True: the layers of T5ForConditionalGeneration have no MLPs"):
        ps.Engine(
            lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)), tiled(small_chunks("fp32"))
        )
