"""Options and fixtures of all tests."""

import gc
import os
import signal

import order
import pytest
import rates
import restore
import sampling
import times
import torch
from late_copies import LateHardware

from patrickstar import testing

if os.environ.get("PATRICKSTAR_TEST_DEVICE") == "strict":
    import strict_device  # noqa: F401  It becomes PyTorch's accelerator before any test runs.
else:
    collect_ignore = ["strict"]


def pytest_addoption(parser):
    parser.addoption(
        "--late-copies",
        type=int,
        metavar="SEED",
        help="run every engine beside a simulated accelerator whose copies are late, by the schedule of this seed",
    )
    parser.addoption(
        "--resident",
        action="store_true",
        help="compare training with plain PyTorch in resident iterations: everything fits, three times the batches",
    )
    parser.addoption("--random-order", type=int, metavar="SEED", help="run files and their tests in random order")
    parser.addoption("--times", metavar="FILE", help="write the processor time of every file and test to a file")


def pytest_configure(config):
    config.pluginmanager.register(times.Times(config.getoption("--times")))
    if config.getoption("--random-order") is not None:
        config.pluginmanager.register(order.RandomOrder(config.getoption("--random-order")))


LONGEST = (
    "each_way_of_checkpointing",
    "five_hundred_runs",
    "test_the_steps_run_in_this_process",
    "test_a_call_runs_writes",
    "test_own_process",
    "test_the_measured_process",
    "distributed/test_cli.py",
    "distributed/test_torchrun.py",
    "test_examples.py",
    "test_kills.py",
)
"""Parts of the names of the longest tests. They start first, so that no worker runs one alone at the end."""


def pytest_collection_modifyitems(config, items):
    if not sampling.nightly():
        selected = sampling.fast(items)
        dropped = set(items).difference(selected)
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = selected
    items.sort(key=lambda item: next((i for i, part in enumerate(LONGEST) if part in item.nodeid), len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exempt what imports make from garbage collection: it takes a fourth of the collection, and half of some tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # extension modules look for leaks at the end


@pytest.fixture(autouse=True)
def _as_before():
    with restore.restored():
        yield


@pytest.fixture(autouse=True, scope="session")
def _equal_rates():
    """Let results of this process not depend on the machine's rates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates.MEASURED, rates.fixed())
        yield


@pytest.fixture(autouse=True)
def _late_copies(request, monkeypatch):
    seed = request.config.getoption("--late-copies")
    if seed is not None:
        monkeypatch.setattr("patrickstar._engine.core.Hardware", lambda device: LateHardware(seed))


@pytest.fixture(autouse=True)
def _resident(request, monkeypatch):
    if request.config.getoption("--resident"):
        assert_exact = testing.assert_exact

        def assert_exact_if_resident(model_func, batches, config, **options):
            assert_exact(model_func, list(batches) * 3, config, **options | {"stress": False})

        monkeypatch.setattr(testing, "assert_exact", assert_exact_if_resident)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_is_heard():
    """A shell that starts tests in the background has them ignore Ctrl-C, and so would every process they start."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def one_thread():
    """Tiny tensors are slower on several threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
