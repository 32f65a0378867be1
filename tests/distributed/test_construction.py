"""Law: a model that processes build in turns has the bits of a plain construction, and few of them exist at a time."""

import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from laws.test_construction import (
    Copies,
    InitialisedTwice,
    Layers,
    OtherReaders,
    entered_without_memory,
    gpt2,
    in_half_precision,
    llama,
)
from torch import nn

import patrickstar as ps
from patrickstar._engine import construction
from patrickstar._engine.construction import most_at_once
from patrickstar._hardware.file_backed_tensors import FileBackedTensors
from patrickstar.errors import ModelError, PeerError

from . import ranks

MODELS: dict[str, Callable[[], nn.Module]] = {
    build.__name__: build for build in (Layers, InitialisedTwice, Copies, OtherReaders, gpt2, llama, in_half_precision)
}
TINY = {"device_memory": "4MiB", "host_memory": "38MiB"}


def state_and_draw(build: Callable[[], nn.Module]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the state of a plain construction, and what is drawn after it."""
    torch.manual_seed(5)
    return dict(build().state_dict()), torch.rand(3)


def check_built(build: Callable[[], nn.Module], config: ps.Config, at_once: int) -> None:
    """Assert the bits of a construction by `at_once` processes at a time."""
    expected, drawn = state_and_draw(build)
    torch.manual_seed(5)
    with mock.patch.object(construction, "most_at_once", lambda *bytes_: at_once):
        engine, _ = ps.initialize(build, config)
    assert torch.equal(torch.rand(3), drawn), "the random state after the construction differs"
    found = engine.state_dict()
    dtypes = {name: value.dtype for name, value in found.items()}
    same = {name: value.to(dtypes[name]) for name, value in expected.items()}
    ps.testing.assert_same_bits(same, found, "parameters and buffers")
    engine.close(keep=False)


@pytest.mark.pairwise
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("at_once", [1, 2])
@ranks.in_processes()
def test_bits_of_a_plain_construction(size, model, precision, at_once):
    """Build a model in turns."""
    check_built(MODELS[model], ps.Config(device="cpu", precision=precision), at_once)


@pytest.mark.parametrize("model", ["InitialisedTwice", "gpt2"])
@ranks.in_processes(2)
def test_bits_of_a_construction_on_disk(model, tmp_path):
    """Build a model larger than memory in turns: every page is dropped at every check."""
    contexts: list[FileBackedTensors] = []
    with mock.patch.object(FileBackedTensors, "__enter__", entered_without_memory(contexts)):
        check_built(MODELS[model], ps.Config(device="cpu", disk=ps.Disk(tmp_path), **TINY), 1)
    assert len(contexts) == 1, "the model was not built on disk"
    assert not list(Path(tmp_path).iterdir())


class Timed(Layers):
    """Layers that take a while, and note when they were built in memory."""

    began: list[float]

    def __init__(self) -> None:
        began = time.monotonic()
        super().__init__()
        if not self.table.is_meta:
            time.sleep(0.2)
            self.began = [began, time.monotonic()]


@ranks.in_processes(4)
def test_as_many_build_at_a_time_as_the_budgets_hold():
    """Note when each process builds, if two may at a time."""
    models, figures = [], []

    def build() -> nn.Module:
        models.append(Timed())
        return models[-1]

    def two_at_once(*given: int) -> int:
        figures.append(given)
        return 2

    config = ps.Config(device="cpu", device_memory="16MiB", host_memory="128MiB", precision="fp32")
    with mock.patch.object(construction, "most_at_once", two_at_once):
        engine, _ = ps.initialize(build, config)
    [(processes, model_bytes, share_bytes, budget_bytes)] = figures
    assert (processes, budget_bytes) == (4, (16 + 128 // 4) << 20)
    assert model_bytes == sum(value.nbytes for value in engine.state_dict().values())
    assert share_bytes == engine.layout.model_data_bytes
    times = torch.tensor(models[-1].began, dtype=torch.float64)
    gathered = [torch.empty_like(times) for _ in range(4)]
    dist.all_gather(gathered, times)
    assert min(gathered[2][0], gathered[3][0]) >= max(gathered[0][1], gathered[1][1])


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_most_at_once(processes):
    model, share = 40, 14
    for budget in range(1, 100):
        count = most_at_once(processes, model, share, budget)
        assert 1 <= count <= processes
        needed = (processes - count) * share + count * model
        assert needed <= processes * budget or count == 1
        assert count == processes or needed + model - share > processes * budget


@ranks.in_processes(2)
def test_a_function_that_communicates_runs_in_all_processes_at_once():
    """Build a model whose function waits for the others."""

    def build() -> nn.Module:
        dist.barrier()
        return Layers()

    torch.manual_seed(3)
    expected = Layers().state_dict()
    torch.manual_seed(3)
    with mock.patch.object(construction, "most_at_once", lambda *figures: pytest.fail("it must not wait for a turn")):
        engine, _ = ps.initialize(build, ps.Config(device="cpu", precision="fp32"))
    ps.testing.assert_same_bits(dict(expected), engine.state_dict(), "parameters and buffers")


@ranks.in_processes(2)
def test_another_model_in_memory_is_refused():
    """Build a model that is larger in memory than on the meta device, in the second turn."""

    def build() -> nn.Module:
        wide = dist.get_rank() == 1 and torch.empty(0).device.type == "cpu"
        return nn.Sequential(nn.Linear(8, 16 if wide else 8, bias=False), nn.Tanh())

    error = (ModelError, "parameter '0.weight' is .8, 8. of torch.float32 on the meta device and .16, 8. of")
    kind, text = error if dist.get_rank() == 1 else (PeerError, "rank 1 .*could not start: ModelError")
    with mock.patch.object(construction, "most_at_once", lambda *figures: 1), pytest.raises(kind, match=text):
        ps.initialize(build, ps.Config(device="cpu"))


@ranks.in_processes(2)
def test_a_constructor_that_fails_ends_all_processes():
    """Let the second process's constructor fail in its turn."""

    class Fails(Layers):
        def __init__(self) -> None:
            super().__init__()
            if not self.table.is_meta and dist.get_rank() == 1:
                raise ValueError("no such layer")

    kind, text = (ValueError, "no such layer") if dist.get_rank() == 1 else (PeerError, "ValueError: no such layer")
    with mock.patch.object(construction, "most_at_once", lambda *figures: 1), pytest.raises(kind, match=text):
        ps.initialize(Fails, ps.Config(device="cpu"))
