"""Copies of models for dry runs."""

from torch import nn

from patrickstar._dry_run.simulation import copy_to_meta


def test_a_meta_copy_keeps_ties_and_frozen_parameters():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    copied = copy_to_meta(model)
    assert copied["b"].weight is copied["a"].weight and copied["a"].weight.is_meta
    assert not copied["a"].bias.requires_grad and copied["b"].bias.requires_grad
    assert not model["a"].weight.is_meta
