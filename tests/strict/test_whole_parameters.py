"""Muon beside an accelerator: matrices are multiplied on the device, and the bits are those of plain PyTorch there."""

import random

import pytest
import strict_device
from laws.test_late_copies import some_are_slow
from laws.tiers import inputs, least_host_bytes, options, small_engine, with_budgets
from seeded import assert_same_model, reference_of
from toys import train
from whole_parameter_cases import MUON, Model

import patrickstar as ps

UPDATE_BYTES = 240_000
"""Device memory that an update of the largest matrix needs."""
LISTS_BYTES = 100_000
"""Host memory for accumulated gradients, which the smallest budget of an error does not count."""


def run_schedule(seed: int, directory) -> set[str]:
    """Train with states on the device, the host or the disk; return the tiers of the matrices."""
    strict_device.configure()
    choice = random.Random(seed)
    loop = choice.choice([{}, {"max_norm": 0.1}, {"accumulation": 2}])
    config = options(
        choice.choice(["bf16", "fp32"]), choice.choice([9000, 40_000]), optimizer=list(MUON.values())[seed % 4]
    )
    config = config.model_copy(update={"device": "strict"})
    disk = ps.Disk(directory) if choice.random() < 0.4 else None
    room = choice.choice([0, 100_000] if disk is not None else [0, 100_000, 4_000_000])
    config = with_budgets(config, UPDATE_BYTES + room, 4_000_000, disk)
    if disk is not None:
        host = least_host_bytes(Model, with_budgets(config, UPDATE_BYTES + room, 1, disk)) + LISTS_BYTES
        config = with_budgets(config, UPDATE_BYTES + room, host, disk)
    batches = [tuple(tensor.to("strict") for tensor in batch) for batch in inputs(4)]
    reference = reference_of(Model, config)
    expected = train(reference, batches, **loop)
    strict_device.configure(seed=seed)
    with small_engine(Model, config, evict_everything=choice.random() < 0.3) as engine:
        ps.testing.assert_same_bits(expected, train(engine, batches, **loop), f"schedule {seed}: losses and norms")
        assert_same_model(reference, engine, f"schedule {seed}: ")
        return {param.optimizer_tier for param in engine.inspect().parameters if len(param.shape) == 2}


@pytest.mark.parametrize("seeds", some_are_slow(100, fast=6))
def test_no_schedule_changes_results(seeds, tmp_path):
    tiers, refused = set(), []
    for seed in seeds:
        try:
            tiers |= run_schedule(seed, tmp_path)
        except ps.errors.BudgetError as error:  # accumulated gradients may need more
            refused.append(f"seed {seed}: {error}")
    assert len(refused) <= 1, "\n".join(refused)
    assert len(tiers) > 1, f"all on the tier {tiers}"
