"""Margins: what budgets leave of a device and of the RAM, the same for defaults and plans."""

import pytest

from patrickstar._hardware.ram import Ram, RamLimit
from patrickstar._perf_model.machine_parts import machine_of_parts
from patrickstar._perf_model.margins import CONTEXT_BYTES, PROCESS_BYTES, SYSTEM_BYTES, Margins, device_budget

GIB, GB = 1 << 30, 10**9
PC = machine_of_parts("rtx4060", host_memory="16GB")


@pytest.mark.parametrize(
    ("free_bytes", "several", "expected"),
    [
        (80 * GIB, False, 80 * GIB - 3 * GIB // 2),
        (80 * GIB, True, 80 * GIB - 5 * GIB // 2),
        (16 * GIB, False, 16 * GIB - 3 * GIB // 2),
        (16 * GIB, True, 16 * GIB - 5 * GIB // 2),
        (2 * GIB, False, GIB),
        (0, False, 0),
    ],
)
def test_default_budget_leaves_a_margin(free_bytes, several, expected):
    assert device_budget(free_bytes, several) == expected
    assert device_budget(free_bytes, several) <= device_budget(free_bytes)


@pytest.mark.parametrize("several", [False, True])
def test_a_described_machine_has_the_budgets_that_training_would_choose_on_it(several):
    gpus = 2 if several else 1
    budgets = Margins().budgets(PC, gpus, several)
    assert budgets.gpu.memory == device_budget(8 * GIB - CONTEXT_BYTES, several)
    free_bytes = 16 * GB - SYSTEM_BYTES - gpus * PROCESS_BYTES
    assert budgets.host.memory == Ram((RamLimit(16 * GB, free_bytes),)).default_bytes()
    assert PC.gpu.memory == 8 * GIB and PC.host.memory == 16 * GB


def test_what_stays_free_is_said_with_its_reason():
    device, host = Margins().described(PC)
    assert device == "of 8.00 GiB of the device 2.00 GiB stay for its context, kernels and libraries"
    assert host.startswith("of 16.0 GB of RAM 3.6 GB stay: 1.5 GB for the system, 0.55 GB for the process, the rest")
    assert "buffers of collectives" in Margins().described(PC, 2, several=True)[0]


def test_from_a_budget_nothing_is_taken_off():
    budgets = Margins(device=False, host=False)
    assert budgets.budgets(PC) == PC and budgets.described(PC) == []
    assert Margins(device=False).budgets(PC).gpu == PC.gpu


def test_a_machine_without_room_has_a_budget_that_nothing_fits():
    tiny = machine_of_parts("rtx4060", host_memory="1GB")
    assert Margins().budgets(tiny).host.memory == 1
