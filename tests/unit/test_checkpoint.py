"""Checkpoint folders: what is written, what is refused, and that nothing is lost either way."""

import errno
import functools
import json
import os
import pickle
import random
import resource
import shutil
import time
import tracemalloc
from collections import Counter, OrderedDict

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from xxhash import xxh3_64_hexdigest

import patrickstar as ps
from patrickstar import testing
from patrickstar._checkpoint import atomic_dir as folders
from patrickstar._checkpoint import direct_writer as page_file
from patrickstar._checkpoint import json_codec
from patrickstar._checkpoint.atomic_dir import complete
from patrickstar._checkpoint.direct_writer import write_all
from patrickstar._checkpoint.manifest import NAME
from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._engine.engine import Engine
from patrickstar._layout.shard_geometry import boxes_of
from patrickstar.errors import CheckpointError, ConfigError, TrainingError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 24)
        self.conv = nn.Conv2d(4, 6, 2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 13)
        self.head.bias.requires_grad_(False)
        self.tied = self.words

    def forward(self, ids):
        hidden = self.norm(self.words(ids))
        image = self.conv(hidden[:6].reshape(1, 4, 6, 6)).mean()
        return self.head(hidden).float().pow(2).mean() + image


def config(**options):
    return ps.Config(**{"device": "cpu", "precision": "bf16", "chunk_size": 512} | options)


def engine_of(**options):
    torch.manual_seed(0)
    return Engine(Model, config(**options), meter=testing.NoMeter())


IDS = torch.arange(8) % 13


def train(engine, steps=2):
    for _ in range(steps):
        engine.backward(engine(IDS))
        engine.optimizer.step()


def state_of(engine):
    states = engine.optimizer.state_dict()["state"]
    return [*engine.state_dict().values(), *(value for one in states.values() for value in one.values())]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint, and the engine that wrote it."""
    engine = engine_of()
    train(engine)
    path = tmp_path_factory.mktemp("saved") / "one"
    engine.save(path, {"note": [1, 2], "room": " " * 200})  # room for forgeries
    return path, state_of(engine)


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of it to be damaged."""
    return shutil.copytree(saved[0], tmp_path / "copy")


def assert_refused(path, *words):
    """That loading says why, and changes nothing."""
    engine = engine_of()
    before = state_of(engine)
    with pytest.raises(CheckpointError) as told:
        engine.load(path)
    testing.assert_same_bits(before, state_of(engine), "what was there before")
    for word in words:
        assert word in str(told.value), str(told.value)
    engine.close()


# What is written


def test_its_files_are_safetensors_that_any_tool_reads(saved):
    path, _ = saved
    assert sorted(one.name for one in path.iterdir()) == [NAME, "rank-00000.safetensors"]
    found = load_file(path / "rank-00000.safetensors")
    engine = engine_of()
    engine.load(path)
    for name, value in engine.state_dict().items():
        if not name.startswith("tied"):
            assert torch.equal(found[f"model.{name}"], value), name
    assert found["model.words.weight"].dtype is torch.float32, "masters are saved in full"
    assert found["model.head.bias"].dtype is torch.bfloat16, "what is frozen has no master"
    assert "optim.state.head.bias.exp_avg" not in found
    assert found["optim.state.conv.weight.exp_avg"].shape == (6, 4, 2, 2)


def test_plain_pytorch_loads_it_through_dcp(saved):
    path, _ = saved
    torch.manual_seed(1)
    model = Model()
    values = {"model": {name: value for name, value in model.state_dict().items() if not name.startswith("tied")}}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(values, storage_reader=CheckpointReader(path))
    engine = engine_of()
    engine.load(path)
    expected = {name: value for name, value in engine.state_dict().items() if not name.startswith("tied")}
    assert all(torch.equal(values["model"][name].to(value.dtype), value) for name, value in expected.items())


@pytest.mark.parametrize("options", [{"precision": "fp32"}, {"precision": "fp16"}, {"chunk_size": "auto"}])
def test_any_precision_and_chunk_size_take_it(saved, options):
    path, state = saved
    engine = engine_of(**options)
    assert engine.load(path)["note"] == [1, 2]
    found = state_of(engine)
    assert all(torch.equal(a.to(b.dtype), b) for a, b in zip(state, found, strict=True))
    train(engine)


def test_what_was_frozen_then_and_is_not_now_has_fresh_states(saved):
    torch.manual_seed(0)
    model = Model()
    model.head.bias.requires_grad_(True)
    model.conv.requires_grad_(False)
    engine = Engine(model, config(), meter=testing.NoMeter())
    engine.load(saved[0])
    by_name = {managed.name: managed for managed in engine._core.data.managed_params}
    assert by_name["head.bias"].steps == 0 and by_name["words.weight"].steps == 2
    assert not engine._core.model_state.read(by_name["head.bias"], "exp_avg").any()
    train(engine)


def test_a_wait_for_nothing_is_no_checkpoint(tmp_path):
    engine = engine_of()
    engine.backward(engine(IDS))
    with pytest.raises(TrainingError, match="gradient that no step has used"):
        engine.save(tmp_path / "one")
    engine.optimizer.zero_grad()
    engine.save(tmp_path / "one")
    with pytest.raises(CheckpointError, match="exists"):
        engine.save(tmp_path / "one")
    assert [one.name for one in tmp_path.iterdir()] == ["one"]


def test_closing_waits_for_a_checkpoint_and_collecting_gives_it_up(tmp_path):
    engine = engine_of()
    engine.save(tmp_path / "one", wait=False)
    engine.close()
    assert (tmp_path / "one" / NAME).exists()


# Folders of checkpoints


def test_keeping_the_last(tmp_path):
    checkpoints = ps.Checkpoints(tmp_path / "run", keep=2)
    engine = engine_of()
    assert checkpoints.load(engine) is None and checkpoints.newest() is None
    for step in (1, 2, 10, 9):
        assert checkpoints.save(engine, step, {"step": step}, wait=step % 2 == 0)
    engine.close()
    assert [path.name for path in checkpoints.all()] == ["step-10", "step-9"], "the order is that of writing"
    engine = engine_of()
    assert checkpoints.load(engine) == {"step": 9}
    checkpoints.save(engine, 9, {"step": 9})
    assert [path.name for path in checkpoints.all()] == ["step-9", "step-9-2"], "none takes the place of another"
    with pytest.raises(ConfigError, match="keep=0"):
        ps.Checkpoints(tmp_path, keep=0)


def test_leftovers_are_no_checkpoints_and_go_away(tmp_path, saved):
    left = tmp_path / ".step-3.abc.patrickstar-partial"
    shutil.copytree(saved[0], left)
    busy = tmp_path / ".step-4.abc.patrickstar-partial"
    busy.mkdir()
    lock = os.open(busy, os.O_RDONLY)
    folders.fcntl.flock(lock, folders.fcntl.LOCK_SH)
    checkpoints = ps.Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    engine = engine_of()
    checkpoints.save(engine, 5)
    assert not left.exists() and busy.exists(), "what a living process writes stays"
    os.close(lock)


class Scheduler:
    """Something with a state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


def test_states_that_are_not_plain_are_named(tmp_path):
    engine = engine_of()
    with pytest.raises(CheckpointError, match=r"the state\['user'\]\['loader'\]\['worker'\] is a Scheduler"):
        engine.save(tmp_path / "one", {"loader": {"worker": Scheduler(1)}})
    assert not list(tmp_path.iterdir())
    engine.save(tmp_path / "one", {"scheduler": Scheduler({1: (2, 3)})})
    found = Scheduler(None)
    engine.load(tmp_path / "one", {"scheduler": found})
    assert found.value == {1: (2, 3)}
    with pytest.raises(CheckpointError, match="no state 'sampler'"):
        engine.load(tmp_path / "one", {"sampler": found})


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
data = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$tuple", "$dict", "a"]), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(data)
def test_plain_data_come_back(value):
    found = json_codec.loads(json_codec.dumps(value, "it"), "it")
    assert found == value and repr(found) == repr(value)


def test_other_plain_data_come_back():
    value = [Counter({3: 1}), OrderedDict(b=1, a=2), {1, 2}, frozenset("a"), float("inf"), errno.ENOSPC, numpy.int64(3)]
    assert json_codec.loads(json_codec.dumps(value, "it"), "it") == value
    for array in (numpy.arange(6, dtype=numpy.uint32).reshape(2, 3), numpy.empty((0, 2))):
        found = json_codec.loads(json_codec.dumps(array, "it"), "it")
        assert found.dtype == array.dtype and numpy.array_equal(found, array)
    for tensor in (torch.randn(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 3), torch.tensor([True])):
        found = json_codec.loads(json_codec.dumps(tensor, "it"), "it")
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_are_the_elements_in_their_order(shape, draw):
    numel = torch.Size(shape).numel()
    first = draw.draw(st.integers(0, numel))
    end = draw.draw(st.integers(first, numel))
    whole = torch.arange(numel).view(shape)
    found = []
    for begin, box in boxes_of(shape, first, end):
        inside = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            inside = inside.narrow(dim, offset, size)
        assert inside.numel() == box.numel and int(inside.reshape(-1)[0]) == begin
        found += inside.reshape(-1).tolist()
    assert found == list(range(first, end))
    assert len(boxes_of(shape, first, end)) <= max(1, 2 * len(shape) - 1)


# What is refused


def test_every_flipped_bit_is_found(saved, tmp_path):
    path, _ = saved
    draw = random.Random(5)
    for number in range(12):
        copy = shutil.copytree(path, tmp_path / str(number))
        file = draw.choice(sorted(copy.iterdir()))
        content = bytearray(file.read_bytes())
        # Of the first line some words are looked at by themselves, and say more than that a byte is wrong.
        at = draw.randrange(len(content))
        content[at] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
        print(f"seed 5: byte {at} of {file.name}")
        assert_refused(copy)


@pytest.mark.parametrize("name", [NAME, "rank-00000.safetensors"])
def test_truncated_and_missing_files(copy, name):
    file = copy / name
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert_refused(copy, "bytes")
    file.write_bytes(content[: len(content) // 2])
    assert_refused(copy)
    file.write_bytes(b"")
    assert_refused(copy)
    file.unlink()
    assert_refused(copy)


def test_what_is_no_checkpoint(tmp_path):
    assert_refused(tmp_path / "nothing", "no such folder")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "checkpoint.jsonl")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    assert_refused(tmp_path / "dcp", "pickle")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert_refused(tmp_path / "model", "model folder")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / NAME).write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    assert_refused(tmp_path / "pickled")
    assert not (tmp_path / "ran").exists(), "code was run"


class Trap:
    """A pickle that runs code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def forge(path, change):
    """Change the document, and give it the checksum that it has then."""
    head, text = (path / NAME).read_bytes().split(b"\n", 1)
    told, document = json.loads(head), json.loads(text)
    change(told, document)
    text = json.dumps(document).encode()
    if told.get("nbytes") is not None:
        told |= {"nbytes": len(text), "xxh3": xxh3_64_hexdigest(text)}
    (path / NAME).write_bytes(json.dumps(told).encode() + b"\n" + text)


def test_newer_versions(copy):
    forge(copy, lambda head, document: head.update(version=2))
    assert_refused(copy, "version 2", "newer")
    assert complete(copy.parent) == []


def a_tensor(document):
    return document["tensors"]["model.words.weight"]


FORGERIES = {
    "a file elsewhere": lambda head, doc: doc["files"][0].update(name="../../etc/passwd"),
    "an absolute file": lambda head, doc: doc["files"][0].update(name="/etc/passwd"),
    "absurd sizes": lambda head, doc: doc["files"][0].update(nbytes=2**62),
    "absurd pages": lambda head, doc: doc.update(page_bytes=2**40),
    "no pages": lambda head, doc: doc.update(page_bytes=0),
    "absurd shapes": lambda head, doc: a_tensor(doc).update(shape=[2**40, 2**40]),
    "negative shapes": lambda head, doc: a_tensor(doc).update(shape=[-13, -24]),
    "absurd parts": lambda head, doc: a_tensor(doc)["parts"][0].update(sizes=[2**40, 24]),
    "parts outside": lambda head, doc: a_tensor(doc)["parts"][0].update(at=2**40),
    "negative places": lambda head, doc: a_tensor(doc)["parts"][0].update(at=-4096),
    "another file": lambda head, doc: a_tensor(doc)["parts"][0].update(file=7),
    "a dtype of no meaning": lambda head, doc: a_tensor(doc).update(dtype="object"),
    "parts twice": lambda head, doc: a_tensor(doc).update(parts=a_tensor(doc)["parts"] * 2),
    "no parts": lambda head, doc: a_tensor(doc).update(parts=[]),
    "plain data that are not": lambda head, doc: a_tensor(doc).update(plain=True),
    "something else": lambda head, doc: doc.update(code="import os"),
    "no plain data": lambda head, doc: doc["tensors"].pop("patrickstar"),
    "plain data elsewhere": lambda head, doc: doc["tensors"]["patrickstar"]["parts"][0].update(at=4096),
    "deep nesting": lambda head, doc: doc.update(files=json.loads("[" * 900 + "]" * 900)),
    "parts over one another": lambda head, doc: a_tensor(doc).update(
        parts=[
            a_tensor(doc)["parts"][0] | {"sizes": [8, 24]},
            a_tensor(doc)["parts"][0] | {"sizes": [5, 24], "at": a_tensor(doc)["parts"][0]["at"] + 8 * 96},
        ]
    ),
    "a list": lambda head, doc: head.update(format=["patrickstar checkpoint"]),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_forgeries_are_refused_without_great_allocations(copy, what):
    forge(copy, FORGERIES[what])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            engine_of().load(copy)
        assert tracemalloc.get_traced_memory()[1] < 32 * 1024**2
    finally:
        tracemalloc.stop()
    assert_refused(copy)


def test_a_link_instead_of_a_file(copy, tmp_path):
    file = copy / "rank-00000.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert_refused(copy)


def test_another_model_is_told_by_names(copy):
    def rename(head, document):
        tensors = document["tensors"]
        tensors["model.strange"] = tensors.pop("model.conv.bias")
        tensors["model.head.bias"]["shape"] = tensors["model.head.bias"]["parts"][0]["sizes"] = [12]

    forge(copy, rename)
    assert_refused(copy, "it lacks conv.bias", "the model lacks strange", "of another shape are head.bias")


def test_another_optimizer_is_told(copy):
    engine = engine_of(optimizer=ps.SGD(lr=0.1, momentum=0.9))
    with pytest.raises(CheckpointError, match="AdamW"):
        engine.load(copy)


def told_otherwise(path, change):
    """Another plain text in the place of one that is there, with all checksums as they have to be."""
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())

    def forge_both(head, document):
        for name in ("patrickstar", "patrickstar.rank-00000"):
            part = document["tensors"][name]["parts"][0]
            begin, length = part["at"], part["sizes"][0]
            told = json.loads(content[begin : begin + length])
            if "buffers" in told:
                told["buffers"] = []  # room for the forgery
            change(told)
            text = json.dumps(told, separators=(",", ":")).encode()
            assert len(text) <= length, "the forgery is longer than what was there"
            content[begin : begin + length] = text.ljust(length)
        page = document["page_bytes"]
        document["files"][0]["sums"] = [
            xxh3_64_hexdigest(bytes(content[at : at + page])) for at in range(0, len(content), page)
        ]

    forge(path, forge_both)
    file.write_bytes(content)


LIES = {
    "no generators": lambda told: told.pop("random", None),
    "half of the generators": lambda told: told.get("random", {}).pop("python", None),
    "a generator of another kind": lambda told: "random" in told and told["random"].update(torch=5),
    "fewer steps than none": lambda told: "steps" in told and told["steps"].update({"words.weight": -7}),
    "a rate that is no number": lambda told: [group.update(lr="x") for group in told.get("groups", ())],
    "no betas": lambda told: [group.update(betas=None) for group in told.get("groups", ())],
    "extra state of nobody": lambda told: "extra" in told and told["extra"].update({"no.such.module._extra_state": 1}),
    "an array of code": lambda told: "random" in told and told.update(user={"a": {"$array": [",", [0], ""]}}),
    "a tensor of nothing": lambda told: "random" in told and told.update(user={"a": {"$tensor": []}}),
    "a scale of nothing": lambda told: "loss_scale" in told and told.update(loss_scale={"scale": 0.0}),
}


@pytest.mark.parametrize("what", LIES)
def test_plain_data_that_can_not_be_used_change_nothing(copy, what):
    told_otherwise(copy, LIES[what])
    random.seed(4)
    before = random.getstate()
    assert_refused(copy)
    assert random.getstate() == before


@pytest.mark.parametrize(
    "optimizer",
    [ps.Adam(lr=1e-3), functools.partial(torch.optim.NAdam, lr=1e-3), functools.partial(torch.optim.AdamW, lr=1e-3)],
)
def test_an_optimizer_with_the_same_states_is_not_the_same(saved, optimizer):
    engine = engine_of(optimizer=optimizer)
    with pytest.raises(CheckpointError, match="was written with AdamW"):
        engine.load(saved[0])
    train(engine, 1)


def test_a_run_without_a_loss_scale_leaves_the_scaler_as_it_is(saved):
    engine = engine_of(precision="fp16")
    engine.load(saved[0])
    assert engine._core.scaler.scale == 2.0**16


class Odd(nn.Module):
    """With what is rare: no elements, complex numbers, a module that is called like what files are filled up with."""

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


def test_what_is_rare(tmp_path):
    engine = Engine(Odd, config(), meter=testing.NoMeter())
    engine.save(tmp_path / "odd")
    engine.save_pretrained(tmp_path / "folder")
    stored = load_file(tmp_path / "folder" / "model.safetensors")
    assert {"none", "padding.weight", "padding.bias", "one", "turns", "count", "frozen"} == stored.keys()
    other = Engine(Odd, config(), meter=testing.NoMeter())
    other.load(tmp_path / "odd")
    testing.assert_same_bits(state_of(engine), state_of(other), "what was saved")


def test_frozen_parameters_and_buffers_that_are_written_to_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(page_file, "write_all", lambda *args: (time.sleep(0.01), write_all(*args)))
    engine = Engine(Odd, config(), meter=testing.NoMeter())
    before = engine.state_dict()
    engine.save(tmp_path / "odd", wait=False)
    with torch.no_grad():
        engine.module.frozen.fill_(5)
        engine.module.turns.zero_()
    engine.module.frozen.data.fill_(6)
    assert engine.finish_saving()
    other = Engine(Odd, config(), meter=testing.NoMeter())
    other.load(tmp_path / "odd")
    testing.assert_same_bits(before, other.state_dict(), "what was there at the save")


def test_a_step_is_saved_twice_beside_training(tmp_path):
    engine, checkpoints = engine_of(), ps.Checkpoints(tmp_path)
    assert checkpoints.save(engine, 1, wait=False) and checkpoints.save(engine, 1, wait=False)
    engine.close()
    assert [path.name for path in checkpoints.all()] == ["step-1", "step-1-2"]


def test_folders_of_others_stay(tmp_path):
    (tmp_path / ".download.partial").mkdir()
    engine_of().save(tmp_path / "one")
    assert (tmp_path / ".download.partial").is_dir()


# Where the disk is full


def test_a_full_disk_is_a_warning_and_what_was_there_stays(tmp_path):
    checkpoints = ps.Checkpoints(tmp_path, keep=1)
    engine = engine_of()
    checkpoints.save(engine, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for wait in (True, False):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.warns(UserWarning, match=r"training goes on: can't write .*free") as told:
                checkpoints.save(engine, 2, wait=wait)
                train(engine, 1)
                engine._core.background_save.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(told) == 1
        assert [one.name for one in tmp_path.iterdir()] == ["step-1"]
    assert checkpoints.save(engine, 3)
    assert [one.name for one in tmp_path.iterdir()] == ["step-3"]


def test_a_disk_that_fails_in_the_middle(tmp_path, monkeypatch):
    engine = engine_of()
    calls = Counter()

    def failing(fd, memory, at):
        calls["pwrite"] += 1
        if calls["pwrite"] > 3:
            raise OSError(errno.EIO, "Input/output error")
        return write(fd, memory, at)

    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        engine.save(tmp_path / "one")
    monkeypatch.undo()
    assert calls["pwrite"] > 3 and not list(tmp_path.iterdir())
    train(engine)
    engine.save(tmp_path / "one")
