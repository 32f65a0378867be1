"""Timed mode of the strict device: work keeps its order, takes its seconds, and runs beside other streams.

Only lower bounds of times are asserted, and order: the machine may be busy.
"""

import time

import pytest
import strict_device
import torch
from test_strict_device import side_stream

DEVICE = torch.device("strict", 0)
RATES = strict_device.Rates(up=1e6, down=5e5)


@pytest.fixture(autouse=True)
def _timed():
    strict_device.configure(timed=RATES)


@pytest.fixture
def clock():
    """Return a function that waits for the device, and returns the time."""
    return lambda: (torch.accelerator.synchronize(), time.perf_counter())[1]


def add(value: torch.Tensor, seconds: float) -> torch.Event:
    """Queue an operator of these seconds, and return an event behind it."""
    strict_device.extension.charge(seconds)
    value.add_(1)
    event = torch.Event(device=DEVICE)
    event.record()
    return event


def test_an_operator_takes_its_seconds_beside_the_host(clock):
    value = torch.zeros(4, device=DEVICE)
    start_s = clock()
    events = [add(value, 0.3) for _ in range(3)]
    assert not events[-1].query()
    events[1].synchronize()
    assert time.perf_counter() - start_s >= 0.6 and not events[2].query()
    events[2].synchronize()
    assert time.perf_counter() - start_s >= 0.9
    assert value.sum().item() == 12


@pytest.mark.parametrize(("up", "seconds"), [(True, 0.5), (False, 1.0)])
def test_a_copy_takes_its_bytes_by_the_rate_of_its_direction(clock, up, seconds):
    on_host, on_device = torch.full((125_000,), 3.0).pin_memory(), torch.zeros(125_000, device=DEVICE)
    target, source = (on_device, on_host) if up else (on_host, on_device)
    start_s = clock()
    target.copy_(source, non_blocking=True)
    issued_s = time.perf_counter() - start_s
    torch.accelerator.synchronize()
    assert time.perf_counter() - start_s >= seconds > issued_s
    assert torch.equal(on_device.cpu(), on_host)


def test_copies_of_one_direction_share_their_link(clock):
    memory = [torch.zeros(25_000, pin_memory=True) for _ in range(2)]
    targets = [torch.zeros(25_000, device=DEVICE) for _ in range(2)]
    start_s = clock()
    for source, target in zip(memory, targets, strict=True):
        with side_stream(ordered=False):
            target.copy_(source, non_blocking=True)
    torch.accelerator.synchronize()
    assert time.perf_counter() - start_s >= 0.2


def test_streams_run_beside_each_other(clock):
    """A short operator that was queued last ends first, unless it waits for the long one."""
    slow, fast, last = (torch.zeros(4, device=DEVICE) for _ in range(3))
    start_s = clock()
    slow_end = add(slow, 0.5)
    with side_stream(ordered=False):
        fast_end = add(fast, 0.01)
    with side_stream(ordered=False):
        torch.accelerator.current_stream(0).wait_event(slow_end)
        last_end = add(last, 0.01)
    fast_end.synchronize()
    assert not slow_end.query()
    last_end.synchronize()
    assert slow_end.query() and time.perf_counter() - start_s >= 0.51


def test_a_dispatch_mode_charges_operators_also_in_backward(clock):
    weight = torch.ones(8, 8, device=DEVICE, requires_grad=True)
    batch = torch.ones(2, 8, device=DEVICE)
    called: list[str] = []

    def seconds_of(func, args, kwargs, out):
        called.append(str(func.overloadpacket))
        return 0.1 if func is torch.ops.aten.mm.default else 0.0

    start_s = clock()
    with strict_device.OperatorTimes(seconds_of, strict_device.extension.charge) as times:
        (batch @ weight).sum().backward()
        torch.accelerator.synchronize()
    assert called.count("aten.mm") == 2 and times.charged_s == pytest.approx(0.2)
    assert time.perf_counter() - start_s >= 0.2
    assert (weight.grad == 2).all().item()


def test_the_schedule_comes_back_after_timed_mode():
    strict_device.configure()
    assert strict_device.extension.pending_tasks() == 0
    value = torch.zeros(4, device=DEVICE)
    for _ in range(5):
        strict_device.configure(timed=RATES)
        add(value, 0.01).synchronize()
        strict_device.configure(seed=1)
        value.add_(1)
    assert value.sum().item() == 40
