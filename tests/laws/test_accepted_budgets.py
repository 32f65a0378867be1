"""Budgets that the check before training accepts are sufficient for it, if the tiers hold only model data."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import draws
from test_feasibility import budgets, layers_as_case, named, refusal, shares
from torch import nn
from toys import train

import patrickstar as ps
from patrickstar._engine.engine import Engine
from patrickstar._schedule.feasibility import working_set_bytes
from patrickstar.testing import NoMeter


def chain(widths: list[int]) -> nn.Module:
    return nn.Sequential(*(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in pairwise(widths)))


def train_two_steps(widths: list[int], device_bytes: int, host_bytes: int) -> None:
    """Train a chain of layers, each in its own chunk."""
    config = ps.Config(device="cpu", device_memory=device_bytes, host_memory=max(1, host_bytes), chunk_size=2)
    with Engine(chain(widths), config, meter=NoMeter()) as engine:
        train(engine, [(torch.ones(1, widths[0]),)] * 2)


@pytest.mark.parametrize("widths", [[16, 16], [16, 16, 16, 16], [8, 16, 32, 16, 8, 4], [32, 32, 4, 4]], ids=str)
@pytest.mark.parametrize("room", [0, 1, 5, 8, 12, 15, 16, 17, 24, 40, 112, 200])
def test_budgets_that_pass_the_check_can_be_trained_with(widths, room):
    """Train with a device budget in sixteenths of `param16` and the smallest accepted host budget."""
    case = layers_as_case(widths)
    device = max(case[0].param16_bytes * room // 16, working_set_bytes(*case))
    error = refusal(case, device, 0)
    train_two_steps(widths, *((device, 0) if error is None else named(error)[1]))


@settings(derandomize=True, deadline=None, max_examples=draws(50))
@given(st.lists(st.integers(1, 32), min_size=2, max_size=7), shares, shares)
def test_any_budgets_that_pass_the_check_can_be_trained_with(widths, device_share, host_share):
    case = layers_as_case(widths)
    device, host = budgets(case, device_share, host_share)
    if refusal(case, device, host) is None:
        train_two_steps(widths, device, host)
