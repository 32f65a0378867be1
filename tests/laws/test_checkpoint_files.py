"""Files of checkpoints: other readers, options and models; their folders: atomicity, old ones, failing disks."""

import errno
import functools
import os
import shutil
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from probes import read_state, shards_of
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from toys import outcome

import patrickstar as ps
from patrickstar._checkpoint import atomic_dir, direct_writer
from patrickstar._checkpoint.direct_writer import write_all
from patrickstar._checkpoint.load_planner import ShardLoadPlanner
from patrickstar._checkpoint.manifest import NAME
from patrickstar._checkpoint.save_planner import ShardSavePlanner, param_shards
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._layout.shard_geometry import Box
from patrickstar.errors import CheckpointError, ConfigError, TrainingError

from .checkpoint_cases import IDS, Model, config, engine_of, train_steps
from .tiers import files_no_larger_than


def test_other_libraries_read_the_files(saved_checkpoint):
    path, _ = saved_checkpoint
    assert sorted(file.name for file in path.iterdir()) == [NAME, "rank-00000.safetensors"]
    tensors = load_file(path / "rank-00000.safetensors")
    engine = engine_of()
    engine.load(path)
    expected = {name: value for name, value in engine.state_dict().items() if not name.startswith("tied")}
    for name, value in expected.items():
        assert torch.equal(tensors[f"model.{name}"], value), name
    assert tensors["model.words.weight"].dtype is torch.float32, "master parameters are saved in fp32"
    assert tensors["model.head.bias"].dtype is torch.bfloat16, "frozen parameters have no master parameter"
    assert "optim.state.head.bias.exp_avg" not in tensors
    assert tensors["optim.state.conv.weight.exp_avg"].shape == (6, 4, 2, 2)
    # torch.distributed.checkpoint loads the folder.
    torch.manual_seed(1)
    values = {"model": {name: value for name, value in Model().state_dict().items() if name in expected}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(values, storage_reader=CheckpointReader(path))
    assert all(torch.equal(values["model"][name].to(value.dtype), value) for name, value in expected.items())


@pytest.mark.parametrize("options", [{"precision": "fp32"}, {"precision": "fp16"}, {"chunk_size": "auto"}])
def test_load_with_another_precision_or_chunk_size(saved_checkpoint, options):
    path, state = saved_checkpoint
    engine = engine_of(**options)
    assert engine.load(path)["note"] == [1, 2]
    loaded = outcome(engine)
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(state, loaded, strict=True))
    # The checkpoint has no loss scale.
    assert engine.inspect().loss_scale == (2.0**16 if options.get("precision") == "fp16" else 1.0)
    train_steps(engine)


def test_unfrozen_parameters_get_zero_states(saved_checkpoint):
    torch.manual_seed(0)
    model = Model()
    model.head.bias.requires_grad_(True)
    model.conv.requires_grad_(False)
    engine = ps.Engine(model, config(), meter=ps.testing.NoMeter())
    engine.load(saved_checkpoint[0])
    steps = {param.name: param.steps for param in engine.inspect().parameters}
    assert steps["head.bias"] == 0 and steps["words.weight"] == 2
    assert not read_state(engine, "head.bias", "exp_avg").any()
    train_steps(engine)


@pytest.mark.parametrize(
    "optimizer",
    [
        *(ps.Adam(lr=1e-3), ps.SGD(lr=0.1, momentum=0.9)),
        *(functools.partial(optimizer, lr=1e-3) for optimizer in (torch.optim.NAdam, torch.optim.AdamW)),
    ],
)
def test_another_optimizer_is_rejected(saved_checkpoint, optimizer):
    engine = engine_of(optimizer=optimizer)
    with pytest.raises(CheckpointError, match="was written with AdamW"):
        engine.load(saved_checkpoint[0])
    train_steps(engine, 1)


class UnusualModel(nn.Module):
    """Model with an empty parameter, complex numbers, and a module that is named like padding tensors."""

    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))
        self.padding = nn.Linear(9, 5)
        self.one = nn.Parameter(torch.ones(()))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("count", torch.tensor(7, dtype=torch.uint16))
        self.frozen = nn.Parameter(torch.randn(40, 40), requires_grad=False)

    def forward(self, x):
        return (self.padding(x) * self.one).float().pow(2).mean() + self.frozen.float().sum() * 0


def test_unusual_tensors(tmp_path):
    engine = ps.Engine(UnusualModel, config(), meter=ps.testing.NoMeter())
    engine.save(tmp_path / "odd")
    engine.save_pretrained(tmp_path / "folder")
    stored = load_file(tmp_path / "folder" / "model.safetensors")
    assert {"none", "padding.weight", "padding.bias", "one", "turns", "count", "frozen"} == stored.keys()
    other = ps.Engine(UnusualModel, config(), meter=ps.testing.NoMeter())
    other.load(tmp_path / "odd")
    ps.testing.assert_same_bits(outcome(engine), outcome(other), "saved state")


def test_writes_to_frozen_parameters_and_buffers_during_a_save(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_writer, "write_all", lambda *args: (time.sleep(0.01), write_all(*args)))
    engine = ps.Engine(UnusualModel, config(), meter=ps.testing.NoMeter())
    before = engine.state_dict()
    engine.save(tmp_path / "odd", wait=False)
    with torch.no_grad():
        engine.module.frozen.fill_(5)
        engine.module.turns.zero_()
    engine.module.frozen.data.fill_(6)
    assert engine.finish_saving()
    other = ps.Engine(UnusualModel, config(), meter=ps.testing.NoMeter())
    other.load(tmp_path / "odd")
    ps.testing.assert_same_bits(before, other.state_dict(), "state at the save")


class Scheduler:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


def test_unsupported_types_in_the_state_are_named(tmp_path):
    engine = engine_of()
    with pytest.raises(CheckpointError, match=r"the state\['user'\]\['loader'\]\['worker'\] is a Scheduler"):
        engine.save(tmp_path / "one", {"loader": {"worker": Scheduler(1)}})
    assert not list(tmp_path.iterdir())
    engine.save(tmp_path / "one", {"scheduler": Scheduler({1: (2, 3)})})
    scheduler = Scheduler(None)
    engine.load(tmp_path / "one", {"scheduler": scheduler})
    assert scheduler.value == {1: (2, 3)}
    with pytest.raises(CheckpointError, match="no state 'sampler'"):
        engine.load(tmp_path / "one", {"sampler": scheduler})


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([slice(0, 5), slice(8, 13)], r"lacks \[5:8, 0:24\] of model\.words\.weight"),
        ([], r"lacks \[0:13, 0:24\] of model\.words\.weight"),
        ([slice(0, 9), slice(8, 13)], r"has several values for elements of \[0:13, 0:24\] of model\.words\.weight"),
    ],
)
def test_checkpoint_that_lacks_elements(stored, message):
    engine = engine_of()
    planner = ShardLoadPlanner(shards_of(engine), {}, ())
    sizes = [(torch.Size((rows.start, 0)), torch.Size((rows.stop - rows.start, 24))) for rows in stored]
    chunks = [ChunkStorageMetadata(*each) for each in sizes]  # rows of the embedding, which has 13 of 24 elements
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((13, 24)), chunks)
    planner.set_up_planner({}, Metadata({"model.words.weight": entry}))
    with pytest.raises(CheckpointError, match=message):
        planner.create_local_plan()
    engine.close()


def test_processes_that_lack_elements():
    engine = engine_of()
    data = shards_of(engine)
    shards = param_shards(data, list(data.by_chunk))
    number = next(number for number, shard in enumerate(shards) if shard.name == "model.words.weight")
    shards[number] = replace(shards[number], box=Box((2, 0), (11, 24)))
    planner = ShardSavePlanner(shards, data)
    with pytest.raises(CheckpointError, match=r"no process holds elements \[0:2, 0:24\] of model\.words\.weight"):
        planner.create_global_plan([planner.create_local_plan(), SavePlan([])])
    engine.close()


def test_failed_saves_leave_no_files(tmp_path):
    engine = engine_of()
    engine.backward(engine(IDS))
    with pytest.raises(TrainingError, match="gradient that no step has used"):
        engine.save(tmp_path / "one")
    engine.optimizer.zero_grad()
    engine.save(tmp_path / "one")
    with pytest.raises(CheckpointError, match="exists"):
        engine.save(tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_keep_limits_the_number_of_checkpoints(tmp_path):
    checkpoints = ps.Checkpoints(tmp_path / "run", keep=2)
    engine = engine_of()
    assert checkpoints.load(engine) is None and checkpoints.newest() is None
    for step in (1, 2, 10, 9):
        assert checkpoints.save(engine, step, {"step": step}, wait=step % 2 == 0)
    engine.close()
    assert [path.name for path in checkpoints.all()] == ["step-10", "step-9"], "ordered by time of writing"
    engine = engine_of()
    assert checkpoints.load(engine) == {"step": 9}
    checkpoints.save(engine, 9, {"step": 9})
    assert [path.name for path in checkpoints.all()] == ["step-9", "step-9-2"], "checkpoints are never replaced"
    with pytest.raises(ConfigError, match="keep=0"):
        ps.Checkpoints(tmp_path, keep=0)


def test_leftovers_are_ignored_and_removed(tmp_path, saved_checkpoint):
    leftover = tmp_path / ".step-3.abc.patrickstar-partial"
    shutil.copytree(saved_checkpoint[0], leftover)
    locked = tmp_path / ".step-4.abc.patrickstar-partial"
    locked.mkdir()
    lock = os.open(locked, os.O_RDONLY)
    atomic_dir.fcntl.flock(lock, atomic_dir.fcntl.LOCK_SH)
    checkpoints = ps.Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    engine = engine_of()
    checkpoints.save(engine, 5)
    assert not leftover.exists() and locked.exists(), "folders of running processes are kept"
    os.close(lock)


def test_two_asynchronous_saves_of_one_step(tmp_path):
    (tmp_path / ".download.partial").mkdir()
    engine, checkpoints = engine_of(), ps.Checkpoints(tmp_path)
    assert checkpoints.save(engine, 1, wait=False) and checkpoints.save(engine, 1, wait=False)
    engine.close()  # waits for both
    assert (tmp_path / ".download.partial").is_dir(), "a foreign folder is kept"
    assert [path.name for path in checkpoints.all()] == ["step-1", "step-1-2"]


def test_full_disk_warns_and_keeps_the_old_checkpoint(tmp_path):
    checkpoints = ps.Checkpoints(tmp_path, keep=1)
    engine = engine_of()
    checkpoints.save(engine, 1)
    for wait in (True, False):
        warning = pytest.warns(UserWarning, match=r"training continues: can't write .*free")
        with files_no_larger_than(4096), warning as warned:
            checkpoints.save(engine, 2, wait=wait)
            train_steps(engine, 1)
            engine.finish_saving()
        assert len(warned) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert checkpoints.save(engine, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_disk_error_during_a_save(tmp_path, monkeypatch):
    engine = engine_of()
    calls = Counter()

    def failing(fd, memory, offset):
        calls["pwritev"] += 1
        if calls["pwritev"] > 3:
            raise OSError(errno.EIO, "Input/output error")
        return write(fd, memory, offset)

    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        engine.save(tmp_path / "one")
    monkeypatch.undo()
    assert calls["pwritev"] > 3 and not list(tmp_path.iterdir())
    train_steps(engine)
    engine.save(tmp_path / "one")
