"""Saved activations on their way between an accelerator and the host, by copies that run late."""

from functools import partial

import pytest
import strict_device
import torch
import transformers
from hypothesis import strategies as st
from probes import manager_of
from sampling import drawn
from seeded import engine_of
from torch import nn
from toys import layers, module

import patrickstar as ps
from patrickstar._autograd.activation_offload import BUFFERS
from patrickstar.errors import TrainingError

WIDTH, ROWS = 32, 64
TENSOR_BYTES = ROWS * WIDTH * 4
LLAMA = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=64)


class InPlace(transformers.modeling_layers.GradientCheckpointingLayer):
    """Layer that changes what its product returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden *= 0.5
        return self.second(hidden.sin()).add_(x)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, use_cache=False)).train()


MODELS = {
    "llama": (
        module(lambda m, ids: m.llama(input_ids=ids, labels=ids).loss, llama=llama),
        lambda: (torch.randint(0, 64, (4, 16)),),
    ),
    "in place": (
        module(lambda m, x: m.layers(x).square().mean(), layers=lambda: nn.Sequential(*(InPlace() for _ in range(4)))),
        lambda: (torch.randn(ROWS, WIDTH),),
    ),
}


@drawn(
    40,
    st.sampled_from(list(MODELS)),
    st.sampled_from([0.0, "products", 0.5, 1.0]),
    st.sampled_from([0.3, 0.6, 1.0]),
    st.sampled_from(["fp32", "bf16"]),
    st.integers(1, 2),
    st.integers(0, 9999),
)
def test_bits_are_those_of_activations_that_stay(name, share, offload, precision, accumulation, seed):
    """Copies run late and in any order that events allow, and freed memory is written over."""
    build, inputs = MODELS[name]
    strict_device.configure(seed=seed)
    torch.manual_seed(seed)
    batches = [inputs() for _ in range(4)]
    config = ps.Config(
        device="strict",
        precision=precision,
        chunk_size="8KiB",
        device_memory="4MiB",
        host_memory="8MiB",
        activation_checkpointing=share,
        activation_offload=offload,
    )
    ps.testing.assert_exact(build, batches, config, accumulation=accumulation, seed=seed)


def offloading(count: int = 6, **options: object) -> ps.Engine:
    """Return an engine of layers that save one tensor each."""
    config = ps.Config(device="strict", precision="fp32", chunk_size="8KiB", host_memory="8MiB", **options)
    return engine_of(partial(layers, WIDTH, count, nn.Sigmoid), config)


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH).to("strict")


def copied_bytes(share: float) -> tuple[int, int]:
    """Return the bytes that a step copies to the host and back; all model data is on the device."""
    strict_device.configure(seed=1)
    engine = offloading(device_memory="4MiB", activation_offload=share)
    for _ in range(3):
        engine.backward(engine(inputs()).square().mean())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    copied = engine.stats.last.d2h_bytes, engine.stats.last.h2d_bytes
    engine.close()
    return copied


def test_a_share_of_the_bytes_is_offloaded_and_the_last_tensors_stay():
    (whole, back), (half, half_back) = copied_bytes(1.0), copied_bytes(0.5)
    assert whole >= 6 * TENSOR_BYTES and abs(half - whole / 2) <= TENSOR_BYTES
    assert whole - back == half - half_back == BUFFERS * TENSOR_BYTES


def test_tensors_that_leave_take_what_others_have_not_taken_yet():
    """From the second step on; the peak, at the end of forward, is that of the first."""
    strict_device.configure(seed=1)
    engine = offloading(24, device_memory="4MiB", activation_offload=0.5)
    peaks = []
    for _ in range(4):
        engine.backward(engine(inputs()).square().mean())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        peaks.append(engine.stats.last.device_peak_non_model_bytes)
    assert max(peaks) <= peaks[0] + TENSOR_BYTES
    engine.close()


def test_tensors_in_flight_are_bounded_and_freed_with_their_graph():
    strict_device.configure(seed=1)
    engine = offloading(device_memory="4MiB", activation_offload=True)
    manager = manager_of(engine)
    accelerator = manager.hardware.accelerator
    assert accelerator is not None
    before = accelerator.allocated_bytes
    out = engine(inputs())
    held = accelerator.allocated_bytes - before - out.nbytes
    assert held <= (BUFFERS + 1) * TENSOR_BYTES, "of twelve saved tensors"
    del out
    out = engine(inputs())
    assert manager.host_tier.other_bytes <= 13 * TENSOR_BYTES, "blocks of the first graph are released"
    engine.backward(out.square().mean())
    engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_memory_of_tensors_that_backward_did_not_reach_is_used_after_their_copies(seed):
    """A backward ends in the middle while tensors come back, and its graph is freed."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        middle[:] = [m.first(x)]
        return m.last(middle[0])

    middle: list[torch.Tensor] = []
    build = module(forward, first=lambda: layers(WIDTH, 6, nn.Sigmoid), last=lambda: layers(WIDTH, 2, nn.Sigmoid))
    found = []
    for options in ({}, {"activation_offload": True}):
        strict_device.configure(seed=seed)
        config = ps.Config(device="strict", precision="fp32", device_memory="4MiB", host_memory="8MiB", **options)
        engine = engine_of(build, config)
        for _ in range(3):
            loss = engine(inputs()).square().mean()
            (gradient,) = torch.autograd.grad(loss, middle)
            del loss
            middle.clear()
            engine.backward(engine(inputs()).square().mean())
            middle.clear()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        found.append({"middle": gradient, **engine.state_dict()})
        engine.close()
    ps.testing.assert_same_bits(*found, "parameters")


def test_a_tensor_that_is_changed_while_it_is_copied_is_an_error_by_shape():
    """Plain PyTorch has an error for it, too."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        hidden = m.layer(x).sigmoid()
        again = hidden * 2
        hidden.add_(1)
        return again

    build = module(forward, layer=lambda: nn.Linear(WIDTH, WIDTH))
    strict_device.configure(seed=1)
    config = ps.Config(device="strict", precision="fp32", device_memory="4MiB", activation_offload=True)
    engine = engine_of(build, config)
    with pytest.raises(TrainingError, match=r"shape \(64, 32\) was changed in place .* 8192 bytes"):
        engine.backward(engine(inputs()).sum())
    engine.close()
