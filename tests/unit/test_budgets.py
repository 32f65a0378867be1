"""Budgets that are open share what a machine has available."""

import pytest
from probes import set_ram

import patrickstar as ps
from patrickstar._step.budgets import budgets
from patrickstar._tiers.hardware import Hardware
from patrickstar.errors import BudgetError

GIB = 1 << 30
TOTAL = 100 * GIB


@pytest.fixture
def hardware(monkeypatch) -> Hardware:
    """A machine with 100 GiB of memory, 90 GiB available."""
    set_ram(monkeypatch, 90 * GIB, TOTAL)
    return Hardware(ps.Config(device="cpu").find_device())


@pytest.mark.parametrize(
    ("options", "sharing", "expected"),
    [
        ({}, 1, (40, 40)),
        ({}, 4, (10, 10)),
        ({"device_memory": 10 * GIB}, 1, (10, 70)),
        ({"device_memory": 10 * GIB}, 4, (10, 10)),  # 40 in all, and 10 of the remaining 50 stay free
        ({"host_memory": 40 * GIB}, 4, (10, 10)),
        ({"device_memory": 80 * GIB}, 1, (80, 5)),
        ({"device_memory": 3 * GIB, "host_memory": 88 * GIB // 2}, 2, (3, 22)),
    ],
)
def test_open_budgets_share_what_may_be_taken(hardware, options, sharing, expected):
    device, host = budgets(ps.Config(device="cpu", **options), hardware, sharing)
    assert (device // GIB, host // GIB) == expected


@pytest.mark.parametrize(("option", "processes"), [("device_memory", 3), ("host_memory", 1)])
def test_a_budget_that_leaves_nothing_for_the_other_is_refused(hardware, option, processes):
    with pytest.raises(BudgetError, match=r"nothing is left for \w+_memory: lower"):
        budgets(ps.Config(device="cpu", **{option: 90 * GIB // processes}), hardware, processes)


def test_budgets_beyond_the_memory_name_the_processes_that_share_it(hardware):
    config = ps.Config(device="cpu", device_memory=20 * GIB, host_memory=20 * GIB)
    with pytest.warns(UserWarning, match=rf"of the 4 processes of this machine together may take {100 * GIB} bytes"):
        assert budgets(config, hardware, 4) == (20 * GIB, 5 * GIB)
    assert budgets(config, hardware, 3)[0] == 20 * GIB


def test_memory_is_measured_once_for_all_questions(hardware, monkeypatch):
    before = hardware.host_bytes()
    set_ram(monkeypatch, GIB)
    assert hardware.host_bytes() == before
