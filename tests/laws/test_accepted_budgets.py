"""Budgets that the check before training accepts are sufficient for it, if the tiers hold only model data."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import draws
from test_feasibility import budgets, refusal, shares
from torch import nn
from toys import train

import patrickstar as ps
from patrickstar._engine.engine import Engine
from patrickstar._layout.chunk_mapping import ParamSpec, build_layout
from patrickstar._layout.schema import schema_for
from patrickstar.testing import NoMeter


def chain(widths: list[int]) -> nn.Module:
    return nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairwise(widths)))


def as_case(widths: list[int]):
    schema = schema_for("bfloat16", trained=True)
    params = [ParamSpec(f"p{i}", one * other, schema) for i, (one, other) in enumerate(pairwise(widths))]
    return build_layout(params, 1), [{param.name} for param in params]


def train_two_steps(widths: list[int], device_bytes: int, host_bytes: int) -> None:
    """Train a chain of layers, each in its own chunk."""
    config = ps.Config(device="cpu", device_memory=device_bytes, host_memory=max(1, host_bytes), chunk_size=2)
    with Engine(chain(widths), config, meter=NoMeter()) as engine:
        train(engine, [(torch.ones(1, widths[0]),)] * 2)


@settings(derandomize=True, deadline=None, max_examples=draws(50))
@given(st.lists(st.integers(1, 32), min_size=2, max_size=7), shares, shares)
def test_any_budgets_that_pass_the_check_can_be_trained_with(widths, device_share, host_share):
    case = as_case(widths)
    device, host = budgets(case, device_share, host_share)
    if refusal(case, device, host) is None:
        train_two_steps(widths, device, host)
