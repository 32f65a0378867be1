"""The process group that `ps.join` creates beside an accelerator, without one."""

import pytest
import torch
import torch.distributed as dist

from patrickstar._distributed import rendezvous
from patrickstar._distributed.rendezvous import Launch, join_group


@pytest.mark.parametrize(
    ("device", "backend", "index"),
    [("cpu", "gloo", None), ("cuda:3", "cpu:gloo,cuda:nccl", 3), ("xpu:0", "cpu:gloo,xpu:xccl", 0)],
)
def test_each_device_has_a_backend(device, backend, index, monkeypatch):
    created, selected, at_exit = [], [], []
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: created.append((name, options)))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: selected.append(device.index))
    monkeypatch.setattr(rendezvous.atexit, "register", at_exit.append)
    join_group(torch.device(device), Launch())
    ((name, options),) = created
    assert name == backend
    assert (options["rank"], options["world_size"]) == (0, 1)
    assert selected == ([] if index is None else [index])
    assert at_exit == [rendezvous._destroy_process_group]


def test_no_variables_mean_one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert Launch.from_environment() == Launch(0, 1)
    monkeypatch.setenv("RANK", "1")
    assert Launch.from_environment() == Launch(0, 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Launch.from_environment() == Launch(1, 4)
