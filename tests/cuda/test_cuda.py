"""Exactness on a CUDA device."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
from cuda_cases import DEVICE, gpt, marks
from gpu_stages.bits import updated
from probes import shards_of
from torch import nn
from toys import inputs, layers, mean_square, train

import patrickstar as ps
from patrickstar import testing
from patrickstar._autograd.embedding_lookup import _rows_of_gradient
from patrickstar._autograd.gradient_hooks import GradientHooks
from patrickstar._engine.engine import Engine
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar.errors import ModelError

pytestmark = marks


def token_batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 128, (2, 16), generator=generator).to(DEVICE) for _ in range(count)]
    return [{"input_ids": batch, "labels": batch} for batch in ids]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_exact_with_everything_evicted(precision, checkpointing):
    config = ps.Config(device=str(DEVICE), device_memory="1GiB", chunk_size=4096, precision=precision)
    testing.assert_exact(gpt(checkpointing), token_batches(3), config, max_norm=0.5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", ["wrapped", "in place"])
def test_cuda_graphs_are_refused_by_name(way):
    """They would replay kernels at addresses that chunks have left."""

    block = nn.Linear(4, 4)
    if way == "in place":
        block.compile(mode="reduce-overhead")
    model = nn.Sequential(nn.Linear(4, 4), block if way == "in place" else torch.compile(block, mode="reduce-overhead"))
    values = [param.detach().clone() for param in model.parameters()]
    config = ps.Config(device=str(DEVICE))
    with pytest.raises(ModelError, match=r"module '1.*is compiled with CUDA graphs .*max-autotune-no-cudagraphs"):
        ps.initialize(model, config)
    model[1] = block
    block._compiled_call_impl = None
    testing.assert_same_bits(values, [param.detach() for param in model.parameters()], "parameters after the refusal")
    ps.initialize(model, config)[0].close()


def test_exact_with_accumulation_and_offloaded_activations():
    config = ps.Config(device=str(DEVICE), device_memory="1GiB", chunk_size=4096, activation_offload=True)
    testing.assert_exact(gpt(False), token_batches(4), config, accumulation=2)


# cuDNN copies weights that are not contiguous, and warns. Those of the reference are not contiguous either.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.skipif(DEVICE.type == "strict", reason="the strict device has no recurrent kernels")
def test_recurrent_layers():
    config = ps.Config(device=str(DEVICE), device_memory="1GiB", chunk_size=1024, precision="fp32")
    batch = (torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE),)
    testing.assert_exact(
        lambda: nn.LSTM(32, 16, 2, batch_first=True), [batch] * 3, config, loss_fn=lambda out, _: out[0].pow(2).mean()
    )


@pytest.mark.parametrize("memory", ["1GiB", "24MiB"], ids=["updated on the device", "updated on the host"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_updates_beside_backward(memory, precision):
    """The host updates chunks, some of several pages, while the GPU computes."""
    width = 1100

    def script(trainer, optimizer):
        for (x,) in inputs(4, width, rows=2):
            trainer.backward(mean_square(trainer(x.to(DEVICE))), update=True)
            optimizer.step()
        return []

    config = ps.Config(device=str(DEVICE), device_memory=memory, chunk_size="3MiB", precision=precision)
    testing.compare(partial(layers, width, 4, nn.Tanh), config, script, stress=False)


def test_the_eager_backend_has_the_same_bits_on_host_and_device():
    """PyTorch operators on the GPU and on the host, in particular division and square root."""
    results = [updated(device, 100_003, EagerBackend().update) for device in (torch.device("cpu"), DEVICE)]
    testing.assert_same_bits(*results, "updated on the host and on the GPU")


def test_gradients_are_evicted_while_parameters_are_updated():
    """All but the optimizer chunks fit on the device: pages of gradients are copied to the host during updates."""
    width = 2200

    config = ps.Config(device=str(DEVICE), device_memory="64MiB", chunk_size="10MiB")
    testing.assert_exact(partial(layers, width, 2, nn.Tanh), inputs(4, width, rows=2), config, stress=False)


class Words(nn.Module):
    """Model whose embedding is looked up on the host: its output is smaller than its weight.

    Args:
        options: Options of the embedding.
        lookups: Number of lookups of the weight.
    """

    def __init__(self, options: dict[str, Any] | None = None, lookups: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(4000, 64, **options or {})
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        self.lookups = lookups

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        for shift in range(1, self.lookups):
            hidden = torch.tanh(hidden) + self.words((ids + shift) % 4000)
        return self.body(hidden)


def words(count: int, tokens: int = 128) -> list[tuple[torch.Tensor]]:
    """Return batches in which tokens repeat."""
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(0, 20, (4, tokens // 4), generator=generator).to(DEVICE),) for _ in range(count)]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "model",
    [Words, partial(Words, {"padding_idx": 3}), partial(Words, {"scale_grad_by_freq": True}), partial(Words, None, 2)],
    ids=["plain", "padding", "scaled by frequency", "two lookups"],
)
def test_an_embedding_that_stays_on_the_host(model, precision):
    """The lookup runs on the host if fetching the weight costs more than fetching its output; tokens repeat."""
    config = ps.Config(device=str(DEVICE), device_memory="1GiB", chunk_size=4096, precision=precision)
    testing.assert_exact(model, words(4), config)


@pytest.mark.parametrize("update", [False, True])
def test_gradients_of_lookups_on_the_host_arrive_in_one_thread(monkeypatch, update):
    """Else two threads would move chunks at once: autograd runs nodes of host tensors in the calling thread."""
    threads = set()
    move = GradientHooks._move

    def move_and_note(hooks, managed, *args, **kwargs):
        threads.add(threading.get_ident())
        move(hooks, managed, *args, **kwargs)

    monkeypatch.setattr(GradientHooks, "_move", move_and_note)
    engine = testing.stressed(Words, ps.Config(device=str(DEVICE), chunk_size=4096))
    for batch in words(4):
        threads.clear()
        engine.backward(engine(*batch).float().square().mean(), update=update)
        engine.optimizer.step()
        assert len(threads) == 1
    assert any(managed.on_host for managed in shards_of(engine).managed_params)
    engine.close()


def test_a_weight_is_looked_up_on_the_device_where_everything_fits():
    """Although the first step, whose states are still on the host, transfers more of it than lookups would."""
    engine = Engine(Words, ps.Config(device=str(DEVICE), host_memory="64MiB", chunk_size=4096))
    for batch in words(5):
        train(engine, [batch])
    assert not any(managed.on_host for managed in shards_of(engine).managed_params)
    assert engine.stats.last.h2d_bytes == engine.stats.last.d2h_bytes == 0
    engine.close()


def test_a_weight_with_a_hook_of_the_user_is_looked_up_on_the_device():
    engine = testing.stressed(Words, ps.Config(device=str(DEVICE), chunk_size=4096))
    weight, shapes = engine.module.words.weight, []
    for number, batch in enumerate(words(4)):
        if number == 2:
            weight.register_hook(lambda grad: shapes.append(grad.shape))
        engine.backward(engine(*batch).float().square().mean())
        engine.optimizer.step()
    assert shapes == [weight.shape] * 2
    engine.close()


@pytest.mark.pairwise
@pytest.mark.parametrize("tokens", [40, 3000, 9000], ids=str)
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_of_looked_up_rows_have_the_bits_of_the_whole_gradient(dtype, scale, tokens):
    """CUDA's kernel sorts more than 3072 tokens and adds the rows of a long run of equal tokens in parts."""
    generator = torch.Generator().manual_seed(7)
    ids = (torch.rand(tokens, generator=generator).pow(4) * 10_000).long().to(DEVICE)  # few tokens occur often
    grad = torch.randn(tokens, 64, generator=generator).to(DEVICE, dtype)
    whole = torch.ops.aten.embedding_dense_backward(grad, ids, 10_000, -1, scale)
    rows = _rows_of_gradient(grad, ids, scale)
    found = torch.zeros(10_000, 64, dtype=dtype).index_add_(0, ids.cpu(), rows.cpu())
    testing.assert_same_bits(whole.cpu(), found, "gradient")
