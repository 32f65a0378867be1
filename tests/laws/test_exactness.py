"""Law 1, exactness: for any budget, chunk size and eviction, results are bit-identical to plain PyTorch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import draws
from seeded import compare
from toys import Shape, batches, train

from patrickstar import testing
from patrickstar._engine.engine import Engine

from .models import Waves, chunk_sizes, config, precisions, shapes, smallest_device_bytes


@settings(max_examples=draws(25), deadline=None, print_blob=True)
@given(shapes, chunk_sizes, precisions, st.integers(1, 3), st.sampled_from([None, 0.1]))
def test_everything_evicted_at_every_access(shape, chunk_size, precision, accumulation, max_norm):
    data = batches(4)
    options = config(precision, chunk_size)
    testing.assert_exact(shape.build, data, options, accumulation=accumulation, max_norm=max_norm)


@settings(max_examples=draws(25), deadline=None, print_blob=True)
@given(shapes, chunk_sizes, precisions, st.integers(0, 16000), st.integers(0, 12000))
def test_any_device_budget(shape, chunk_size, precision, spare_bytes, wave_bytes):
    """Budgets from the minimum of the largest operator upwards, with varying non-model data."""
    least = smallest_device_bytes(shape, chunk_size, precision)
    options = config(precision, chunk_size, device_memory=least + spare_bytes + wave_bytes)
    compare(shape.build, options, lambda trainer: train(trainer, batches(4)), meter=Waves(wave_bytes))


def test_a_wrong_bit_is_found():
    """Check the assertion itself: an engine whose parameter differs by one bit does not pass."""
    shape = Shape(("mlp",))

    def script(trainer, optimizer):
        if isinstance(trainer, Engine):
            with torch.no_grad():
                weight = trainer.module.head.weight
                weight[0, 0] = torch.nextafter(weight[0, 0].detach().clone(), torch.tensor(9.0, dtype=weight.dtype))
        return []

    with pytest.raises(AssertionError, match=r"head\.weight"):
        testing.compare(shape.build, config("bf16", 256), script)
