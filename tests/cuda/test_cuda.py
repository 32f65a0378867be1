"""The laws on a CUDA device: the same code, other memory. Skipped, with the reason, where there is none."""

import os

import pytest
import torch
from torch import nn

import patrickstar as ps
from patrickstar import testing
from patrickstar.engine.engine import Engine
from patrickstar.errors import BudgetError
from patrickstar.kernels.adam import AdamRule
from patrickstar.kernels.listed import Listed
from patrickstar.kernels.rule import Gradient, Span
from patrickstar.layout.sizes import parse_size

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine offers no CUDA device"),
]


@pytest.fixture(autouse=True)
def _deterministic():
    """Kernels that add in any order would differ from themselves."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gpt(checkpointing: bool):
    transformers = pytest.importorskip("transformers")

    def build():
        shape = dict(n_layer=3, n_embd=64, n_head=4, vocab_size=128, use_cache=False, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    return build


def token_batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 128, (2, 16), generator=generator) for _ in range(count)]
    return [{"input_ids": batch.cuda(), "labels": batch.cuda()} for batch in ids]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_exact_with_everything_evicted(precision, checkpointing):
    config = ps.Config(device="cuda", device_memory="1GiB", chunk_size=4096, precision=precision)
    testing.assert_exact(gpt(checkpointing), token_batches(3), config, max_norm=0.5)


def test_exact_with_accumulation_and_offloaded_activations():
    config = ps.Config(device="cuda", device_memory="1GiB", chunk_size=4096, activation_offload=True)
    testing.assert_exact(gpt(False), token_batches(4), config, accumulation=2)


def test_recurrent_layers():
    config = ps.Config(device="cuda", device_memory="1GiB", chunk_size=1024, precision="fp32")
    batch = (torch.randn(2, 5, 32).cuda(),)
    testing.assert_exact(
        lambda: nn.LSTM(32, 16, 2, batch_first=True), [batch] * 3, config, loss_fn=lambda out, _: out[0].pow(2).mean()
    )


def test_the_allocator_stays_within_the_budget():
    """Model data four times the budget, and PyTorch itself is held to little more than the budget."""
    width, budget = 2048, parse_size("256MiB")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.25 * budget / total)
    try:
        config = ps.Config(device="cuda", device_memory=budget, chunk_size="16MiB")
        engine = Engine(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(20))), config)
        assert engine.layout.model_data_bytes > 4 * budget
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            torch.cuda.reset_peak_memory_stats()
            engine.backward(engine(torch.randn(256, width)).float().pow(2).mean())
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            assert torch.cuda.max_memory_allocated() <= budget
        engine.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_out_of_memory_says_what_took_the_bytes():
    width = 1024
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(parse_size("64MiB") / total)
    try:
        engine = Engine(lambda: nn.Linear(width, width), ps.Config(device="cuda", device_memory="1GiB"))
        with pytest.raises(BudgetError, match=r"found no memory.*non-model data"):
            engine(torch.zeros(1 << 14, width, dtype=torch.bfloat16, device="cuda"))
        engine.close()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("memory", ["1GiB", "24MiB"], ids=["updated above", "updated below"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_updates_beside_backward(memory, precision):
    """What the host works on while the GPU goes on, chunks of several pages included."""
    width = 1100

    def build():
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))

    def script(trainer, optimizer):
        for step in range(4):
            x = torch.randn(2, width, generator=torch.Generator().manual_seed(step)).cuda()
            trainer.backward(trainer(x).float().pow(2).mean(), update=True)
            optimizer.step()
        return []

    config = ps.Config(device="cuda", device_memory=memory, chunk_size="3MiB", precision=precision)
    testing.compare(build, config, script, stress=False)


def test_the_written_list_has_the_same_bits_on_both_sides():
    """PyTorch's operators on the GPU and on the host; division and square root above all."""
    generator = torch.Generator().manual_seed(0)
    numel = 100_003
    grad = torch.randn(numel, generator=generator).bfloat16()
    lists = [torch.randn(numel, generator=generator) for _ in range(2)] + [torch.rand(numel, generator=generator)]
    rule = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, step=3)
    found = []
    for device in ("cpu", "cuda"):
        param = grad.to(device, copy=True)
        master, *states = (one.to(device, copy=True) for one in lists)
        Listed().update([Span(param, Gradient(param), master, tuple(states), rule)], (0.5,))
        found.append([one.cpu() for one in (param, master, *states)])
    testing.assert_same_bits(*found, "updated on the host and on the GPU")


def test_gradients_stream_down_and_parameters_up():
    """Everything fits above but the optimizer chunks: pages of gradients come down while others are updated."""
    width = 2200

    def build():
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    batches = [(torch.randn(2, width).cuda(),) for _ in range(4)]
    config = ps.Config(device="cuda", device_memory="64MiB", chunk_size="10MiB")
    testing.assert_exact(build, batches, config, stress=False, loss_fn=lambda out, _: out.float().pow(2).mean())
