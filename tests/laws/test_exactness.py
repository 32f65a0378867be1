"""Law 1, exactness: for any budget, chunk size, eviction and kernel, results are bit-identical to plain PyTorch."""

import random

import pytest
import torch
from hypothesis import strategies as st
from sampling import drawn
from seeded import compare, engine_of
from toys import Shape, batches, train

import patrickstar as ps
from patrickstar._kernels.cpp_backend import CppBackend
from patrickstar._kernels.dispatch import Kernels
from patrickstar._kernels.eager_backend import EagerBackend

from .models import Waves, chunk_sizes, config, precisions, shapes, smallest_device_bytes


@drawn(25, shapes, chunk_sizes, precisions, st.integers(1, 3), st.sampled_from([None, 0.1]))
def test_everything_evicted_at_every_access(shape, chunk_size, precision, accumulation, max_norm):
    data = batches(4)
    options = config(precision, chunk_size)
    ps.testing.assert_exact(shape.build, data, options, accumulation=accumulation, max_norm=max_norm)


@drawn(25, shapes, chunk_sizes, precisions, st.integers(0, 16000), st.integers(0, 12000))
def test_any_device_budget(shape, chunk_size, precision, spare_bytes, wave_bytes):
    """Budgets from the minimum of the largest operator upwards, with varying non-model data."""
    least = smallest_device_bytes(shape, chunk_size, precision)
    options = config(precision, chunk_size, device_memory=least + spare_bytes + wave_bytes)
    compare(shape.build, options, lambda trainer: train(trainer, batches(4)), meter=Waves(wave_bytes))


def test_a_wrong_bit_is_found():
    """Check the assertion itself: an engine whose parameter differs by one bit does not pass."""
    shape = Shape(("mlp",))

    def script(trainer, optimizer):
        if isinstance(trainer, ps.Engine):
            with torch.no_grad():
                weight = trainer.module.head.weight
                weight[0, 0] = torch.nextafter(weight[0, 0].detach().clone(), torch.tensor(9.0, dtype=weight.dtype))
        return []

    with pytest.raises(AssertionError, match=r"head\.weight"):
        ps.testing.compare(shape.build, config("bf16", 256), script)


class RandomKernels(Kernels):
    """Kernels that use a random backend for each update and for each computation of gradient statistics."""

    def __init__(self, seed: int) -> None:
        super().__init__(CppBackend.find())
        found = () if self.cpp is None else self.cpp.variants()
        native = [CppBackend.find(variant, threads) for variant in found for threads in (1, 3)]
        self.implementations = [EagerBackend(), *native]
        self.random = random.Random(seed)

    def for_update(self, span):
        return self.random.choice(self.implementations)

    def for_grad_stats(self, grad):
        return self.random.choice(self.implementations)


@drawn(25, shapes, chunk_sizes, precisions, st.integers(0, 1000))
def test_every_chunk_updated_by_another_implementation(shape, chunk_size, precision, seed):
    hooks = {"kernels": RandomKernels(seed), "evict_everything": True}
    compare(shape.build, config(precision, chunk_size), lambda trainer: train(trainer, batches(4)), **hooks)


def test_gradient_statistics_of_what_is_on_the_device_are_computed_at_once(monkeypatch):
    """On a GPU each call costs launches and a wait."""
    calls = []
    grad_stats = Kernels.grad_stats
    monkeypatch.setattr(
        Kernels, "grad_stats", lambda self, *args: (calls.append(len(args[0])), grad_stats(self, *args))[1]
    )
    engine = engine_of(Shape(("plain",) * 3).build, config("bf16", 256))
    for batch in batches(4):
        calls.clear()
        train(engine, [batch], max_norm=0.1)
    count = sum(1 for _ in engine.module.parameters())
    assert calls == [count] and engine.layout.chunk_count > 3
    engine.close()
