"""Law: a model that is built on disk has the bits of a plain construction, whatever its code does with tensors."""

import copy
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import patrickstar as ps
from patrickstar._memory.cpu_allocator import cpu_allocator
from patrickstar._memory.file_backed_tensors import FileBackedTensors

WIDTH, LAYERS = 1024, 8
TINY = {"device_memory": "16MiB", "host_memory": "64MiB"}


class Layers(nn.Module):
    """Layers initialised in their constructors, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("table", torch.randn(300, 300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.table[0, 0]).sum()


class InitialisedTwice(Layers):
    """Initialises all layers again, in reverse, and scales some of them in place."""

    def __init__(self) -> None:
        super().__init__()
        for layer in reversed(self.layers):
            nn.init.normal_(layer.weight, std=0.02)
        with torch.no_grad():
            for layer in self.layers[::2]:
                layer.weight.div_(3.0)
            self.layers[3].weight.data[10:20] = 1.5


class Copies(Layers):
    """Clones one layer, shares the weight of another, and freezes a third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[5] = copy.deepcopy(self.layers[1])
        self.layers[0].weight = self.layers[2].weight
        self.layers[4].weight.requires_grad_(False)


class OtherReaders(Layers):
    """Writes through NumPy, and from another thread."""

    def __init__(self) -> None:
        super().__init__()
        if self.layers[0].weight.is_meta:
            return
        array = self.layers[0].weight.detach().numpy()
        thread = threading.Thread(target=lambda: np.multiply(array, 0.5, out=array))
        thread.start()
        thread.join()
        self.layers[1].weight.data.copy_(torch.from_numpy(array))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=640, n_head=4, vocab_size=2048, use_cache=False))


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=640,
            intermediate_size=1024,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=2048,
            tie_word_embeddings=True,
        )
    )


def in_half_precision() -> nn.Module:
    return Copies().bfloat16()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "build", [Layers, InitialisedTwice, Copies, OtherReaders, gpt2, llama, in_half_precision], ids=lambda b: b.__name__
)
def test_bits_of_a_plain_construction(build, precision, tmp_path, monkeypatch):
    # Every page is dropped at every check, so that each access after a pause reads the file.
    contexts = []
    enter = FileBackedTensors.__enter__

    def enter_without_memory(self: FileBackedTensors) -> FileBackedTensors:
        self.limit_bytes = -1
        contexts.append(self)
        return enter(self)

    monkeypatch.setattr(FileBackedTensors, "__enter__", enter_without_memory)
    torch.manual_seed(5)
    plain = build()
    drawn = torch.rand(3)
    torch.manual_seed(5)
    engine, _ = ps.initialize(build, ps.Config(device="cpu", precision=precision, disk=ps.Disk(str(tmp_path)), **TINY))
    assert torch.equal(torch.rand(3), drawn), "the random state after the construction differs"
    assert len(contexts) == 1, "the model was not built on disk"
    state = engine.state_dict()
    assert state.keys() == plain.state_dict().keys()
    for name, expected in plain.state_dict().items():
        frozen = name in dict(plain.named_parameters()) and not plain.get_parameter(name).requires_grad
        dtype = state[name].dtype if frozen else expected.dtype
        assert torch.equal(state[name].to(dtype), expected.to(dtype)), name
    engine.close(keep=False)


def test_a_model_in_memory_is_not_built_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(FileBackedTensors, "__enter__", lambda self: pytest.fail("built on disk"))
    config = ps.Config(device="cpu", device_memory="400MiB", host_memory="400MiB", disk=ps.Disk(str(tmp_path)))
    engine, _ = ps.initialize(Layers, config)
    engine.close(keep=False)


def test_a_function_that_returns_an_existing_model(tmp_path):
    model = Layers()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    config = ps.Config(device="cpu", precision="fp32", disk=ps.Disk(str(tmp_path)), **TINY)
    engine, _ = ps.initialize(lambda: model, config)
    state = engine.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    engine.close(keep=False)


def test_a_constructor_that_fails_leaves_nothing(tmp_path):
    class Fails(Layers):
        def __init__(self) -> None:
            super().__init__()
            if not self.table.is_meta:
                raise ValueError("no such layer")

    before = threading.active_count()
    config = ps.Config(device="cpu", disk=ps.Disk(str(tmp_path)), **TINY)
    with pytest.raises(ValueError, match="no such layer"):
        ps.initialize(Fails, config)
    assert threading.active_count() == before
    assert not list(tmp_path.iterdir())
    engine, _ = ps.initialize(Layers, config)
    engine.close(keep=False)


# The file


def file_bytes() -> int:
    return int(psutil.Process().memory_info().shared)


def test_pages_leave_memory_and_come_back(tmp_path):
    allocator = cpu_allocator()
    assert allocator is not None
    nbytes, before = 64 << 20, file_bytes()
    with FileBackedTensors(allocator, tmp_path, 1 << 40, limit_bytes=1 << 40):
        values = torch.randn(nbytes // 4)
        total = values.double().sum()
        assert file_bytes() - before >= nbytes
        allocator.drop_file_pages()
        assert file_bytes() - before < nbytes // 4
        assert values.double().sum() == total
    allocator.drop_file_pages()  # the context has ended, and the tensor stays in memory
    assert values.double().sum() == total
    other = torch.randn(nbytes // 4)
    assert file_bytes() - before < nbytes + (nbytes // 4), "a tensor was allocated in the file after the context"
    del values, other
    assert file_bytes() - before < nbytes // 4


def test_freed_tensors_leave_the_disk(tmp_path):
    allocator = cpu_allocator()
    assert allocator is not None
    with FileBackedTensors(allocator, tmp_path, 1 << 40, limit_bytes=0) as tensors:
        for _ in range(4):
            torch.ones(4 << 20)
        assert tensors.disk_bytes < 1 << 20
        kept = torch.ones(4 << 20)
        assert tensors.disk_bytes >= 16 << 20
    assert kept.sum() == 4 << 20


def test_without_disk_space_tensors_are_in_memory(tmp_path):
    allocator = cpu_allocator()
    assert allocator is not None
    path = tmp_path / "read-only"
    path.touch()
    with path.open("rb") as file:
        assert allocator.open_file(file.fileno(), 1 << 40)
        try:
            values = torch.ones(1 << 20)
            assert allocator.refused_bytes >= values.nbytes
        finally:
            allocator.close_file()
    assert values.sum() == 1 << 20


def test_the_file_stays_within_its_capacity(tmp_path):
    allocator = cpu_allocator()
    assert allocator is not None
    with (
        pytest.warns(UserWarning, match=r"\d+ bytes \(4.00 MiB\) of the model were built in memory.*no space"),
        FileBackedTensors(allocator, tmp_path, 10 << 20, limit_bytes=1 << 40) as tensors,
    ):
        kept = [torch.ones(1 << 20) for _ in range(3)]
        assert tensors.disk_bytes <= 10 << 20
        del kept[0]
        kept.append(torch.ones(1 << 20))  # in the space of the first one
        assert tensors.disk_bytes <= 10 << 20
        tensors.stop_allocating()
    assert all(values.sum() == 1 << 20 for values in kept)


def test_one_file_at_a_time(tmp_path):
    allocator = cpu_allocator()
    assert allocator is not None
    with FileBackedTensors(allocator, tmp_path, 1 << 40, limit_bytes=0) as outer:
        with FileBackedTensors(allocator, tmp_path, 1 << 40, limit_bytes=0) as inner:
            values = torch.ones(1 << 20)
            inner.stop_allocating()
            assert (inner.disk_bytes, outer.disk_bytes > 0) == (0, True)
        more = torch.ones(1 << 20)
        assert outer.disk_bytes >= values.nbytes + more.nbytes
    assert values.sum() == more.sum() == 1 << 20


def test_a_model_that_builds_another_on_disk(tmp_path):
    config = ps.Config(device="cpu", precision="fp32", disk=ps.Disk(str(tmp_path)), **TINY)

    class Outer(Layers):
        def __init__(self) -> None:
            super().__init__()
            if not self.table.is_meta:
                engine, _ = ps.initialize(Layers, config)
                engine.close(keep=False)

    torch.manual_seed(3)
    plain = Outer()
    torch.manual_seed(3)
    engine, _ = ps.initialize(Outer, config)
    state = engine.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    engine.close(keep=False)


# Child processes, other threads, and files of the user


def in_a_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked process, and wait for it."""
    if (pid := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_process_does_not_write_into_its_parents_tensors(tmp_path):
    allocator = cpu_allocator()
    assert allocator is not None
    with FileBackedTensors(allocator, tmp_path, 1 << 40, limit_bytes=1 << 40):
        kept = [torch.ones(1 << 18) for _ in range(4)]

        def child() -> None:
            kept[0].fill_(7)
            others = [torch.full((1 << 18,), 7.0) for _ in range(4)]
            del kept[1:3]
            others.append(torch.full((1 << 18,), 7.0))

        in_a_child(child)
        more = torch.ones(1 << 18)
        assert all(bool((values == 1).all()) for values in (*kept, more))
    in_a_child(lambda: kept[0].fill_(7))  # such a tensor is a large buffer of the model
    assert bool((kept[0] == 1).all())


def test_two_models_built_at_once(tmp_path):
    config = ps.Config(device="cpu", precision="fp32", disk=ps.Disk(str(tmp_path)), **TINY)
    built: dict[float, dict[str, torch.Tensor]] = {}

    class Constant(Layers):
        value = 0.0

        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                nn.init.constant_(layer.weight, self.value)

    def build(value: float) -> None:
        engine, _ = ps.initialize(type("Other", (Constant,), {"value": value}), config)
        built[value] = engine.state_dict()
        engine.close(keep=False)

    threads = [threading.Thread(target=build, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value in (1.0, 2.0):
        assert all(bool((built[value][f"layers.{index}.weight"] == value).all()) for index in range(LAYERS))


def test_a_watcher_that_cannot_start_leaves_files_of_the_user_alone(tmp_path, monkeypatch):
    allocator = cpu_allocator()
    assert allocator is not None

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    tensors = FileBackedTensors(allocator, tmp_path, 1 << 40, limit_bytes=0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            tensors.__enter__()
    tensors.__exit__(None, None, None)
    with (tmp_path / "users").open("w+b") as file:
        file.write(b"important")
        file.flush()
        assert torch.ones(1 << 20).sum() == 1 << 20
        assert (tmp_path / "users").read_bytes() == b"important"


def test_pages_of_other_files_do_not_count(tmp_path):
    allocator = cpu_allocator()
    assert allocator is not None
    path = tmp_path / "checkpoint"
    path.write_bytes(bytes(32 << 20))
    dropped = []
    drop = allocator.drop_file_pages
    with FileBackedTensors(allocator, tmp_path, 1 << 40, limit_bytes=8 << 20) as tensors:
        tensors._allocator = SimpleNamespace(  # counts what the watcher does
            drop_file_pages=lambda: (dropped.append(1), drop()), close_file=allocator.close_file
        )
        mapped = torch.from_file(str(path), shared=False, size=8 << 20)
        mapped.sum()
        while not dropped:
            time.sleep(0.001)
        count = len(dropped)
        for _ in range(20):
            time.sleep(0.005)
        assert len(dropped) <= count + 1
