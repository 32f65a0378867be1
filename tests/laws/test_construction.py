"""Law: a model that is built on disk has the bits of a plain construction, whatever its code does with tensors."""

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import patrickstar as ps
from patrickstar._hardware.cpu_allocator import cpu_allocator
from patrickstar._hardware.file_backed_tensors import FileBackedTensors

from .test_forks import in_child

WIDTH, LAYERS = 512, 12
TINY = {"device_memory": "4MiB", "host_memory": "32MiB"}


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
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=512, use_cache=False))


def llama() -> nn.Module:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "vocab_size": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def in_half_precision() -> nn.Module:
    return Copies().bfloat16()


def on_disk(build: Callable[[], nn.Module], folder: Path, precision: str = "fp32") -> dict[str, torch.Tensor]:
    """Build a model on disk, and return its state."""
    engine, _ = ps.initialize(build, ps.Config(device="cpu", precision=precision, disk=ps.Disk(folder), **TINY))
    state = engine.state_dict()
    engine.close(keep=False)
    return state


def entered_without_memory(contexts: list[FileBackedTensors]) -> Callable[[FileBackedTensors], FileBackedTensors]:
    """Return an `__enter__` that notes its contexts, and lets every page be dropped at every check."""
    enter = FileBackedTensors.__enter__

    def enter_without_memory(self: FileBackedTensors) -> FileBackedTensors:
        self.limit_bytes = -1  # each access after a pause reads the file
        contexts.append(self)
        return enter(self)

    return enter_without_memory


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "build", [Layers, InitialisedTwice, Copies, OtherReaders, gpt2, llama, in_half_precision], ids=lambda b: b.__name__
)
def test_bits_of_a_plain_construction(build, precision, tmp_path, monkeypatch):
    contexts: list[FileBackedTensors] = []
    monkeypatch.setattr(FileBackedTensors, "__enter__", entered_without_memory(contexts))
    torch.manual_seed(5)
    plain = build()
    drawn = torch.rand(3)
    torch.manual_seed(5)
    state = on_disk(build, tmp_path, precision)
    assert torch.equal(torch.rand(3), drawn), "the random state after the construction differs"
    assert len(contexts) == 1, "the model was not built on disk"
    expected = plain.state_dict()
    for name, param in plain.named_parameters():
        if not param.requires_grad:
            expected[name] = expected[name].to(state[name].dtype)
    found = {name: value.to(expected[name].dtype) for name, value in state.items()}
    ps.testing.assert_same_bits(expected, found, "parameters and buffers")


def test_a_model_in_memory_is_not_built_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(FileBackedTensors, "__enter__", lambda self: pytest.fail("built on disk"))
    config = ps.Config(device="cpu", device_memory="400MiB", host_memory="400MiB", disk=ps.Disk(tmp_path))
    ps.initialize(Layers, config)[0].close(keep=False)


def test_a_function_that_returns_an_existing_model(tmp_path):
    model = Layers()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    ps.testing.assert_same_bits(expected, on_disk(lambda: model, tmp_path), "parameters and buffers")


def test_a_constructor_that_fails_leaves_nothing(tmp_path):
    class Fails(Layers):
        def __init__(self) -> None:
            super().__init__()
            if not self.table.is_meta:
                raise ValueError("no such layer")

    before = threading.active_count()
    with pytest.raises(ValueError, match="no such layer"):
        on_disk(Fails, tmp_path, "bf16")
    assert threading.active_count() == before
    assert not list(tmp_path.iterdir())
    on_disk(Layers, tmp_path, "bf16")


# The file


@pytest.fixture
def allocator():
    found = cpu_allocator()
    assert found is not None
    return found


@pytest.fixture
def in_file(allocator, tmp_path):
    """Return a function that makes a context in which tensors are in a file, of so many bytes if they are given."""
    return lambda limit_bytes=0, nbytes=1 << 40: FileBackedTensors(allocator, tmp_path, nbytes, limit_bytes=limit_bytes)


def file_bytes() -> int:
    return int(psutil.Process().memory_info().shared)


def test_pages_leave_memory_and_come_back(allocator, in_file):
    nbytes, before = 64 << 20, file_bytes()
    with in_file(1 << 40):
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


def test_freed_tensors_leave_the_disk(in_file):
    with in_file() as tensors:
        for _ in range(4):
            torch.ones(4 << 20)
        assert tensors.disk_bytes < 1 << 20
        values = torch.ones(4 << 20)
        assert tensors.disk_bytes >= 16 << 20
    assert values.sum() == 4 << 20


def test_without_disk_space_tensors_are_in_memory(allocator, tmp_path):
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


def test_the_file_stays_within_its_capacity(in_file):
    warning = pytest.warns(UserWarning, match=r"\d+ bytes \(4.00 MiB\) of the model were built in memory.*no space")
    with warning, in_file(1 << 40, nbytes=10 << 20) as tensors:
        values_left = [torch.ones(1 << 20) for _ in range(3)]
        assert tensors.disk_bytes <= 10 << 20
        del values_left[0]
        values_left.append(torch.ones(1 << 20))  # in the space of the first one
        assert tensors.disk_bytes <= 10 << 20
        tensors.stop_allocating()
    assert all(values.sum() == 1 << 20 for values in values_left)


def test_one_file_at_a_time(in_file):
    with in_file() as outer:
        with in_file() as inner:
            values = torch.ones(1 << 20)
            inner.stop_allocating()
            assert (inner.disk_bytes, outer.disk_bytes > 0) == (0, True)
        more = torch.ones(1 << 20)
        assert outer.disk_bytes >= values.nbytes + more.nbytes
    assert values.sum() == more.sum() == 1 << 20


def test_a_model_that_builds_another_on_disk(tmp_path):
    class Outer(Layers):
        def __init__(self) -> None:
            super().__init__()
            if not self.table.is_meta:
                on_disk(Layers, tmp_path)

    torch.manual_seed(3)
    plain = Outer()
    torch.manual_seed(3)
    ps.testing.assert_same_bits(dict(plain.state_dict()), on_disk(Outer, tmp_path), "parameters and buffers")


# Child processes, other threads, and files of the user


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_process_does_not_write_into_its_parents_tensors(in_file):
    with in_file(1 << 40):
        values_left = [torch.ones(1 << 18) for _ in range(4)]

        def child() -> None:
            values_left[0].fill_(7)
            others = [torch.full((1 << 18,), 7.0) for _ in range(4)]
            del values_left[1:3]
            others.append(torch.full((1 << 18,), 7.0))

        assert in_child(child) == 0
        more = torch.ones(1 << 18)
        assert all(bool((values == 1).all()) for values in (*values_left, more))
    assert in_child(lambda: values_left[0].fill_(7)) == 0  # such a tensor is a large buffer of the model
    assert bool((values_left[0] == 1).all())


def test_two_models_built_at_once(tmp_path):
    class Constant(Layers):
        value = 0.0

        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                nn.init.constant_(layer.weight, self.value)

    def build(value: float) -> dict[str, torch.Tensor]:
        return on_disk(type("Other", (Constant,), {"value": value}), tmp_path)

    with ThreadPoolExecutor(2) as executor:
        for value, state in enumerate(executor.map(build, (1.0, 2.0)), start=1):
            assert all(bool((state[f"layers.{index}.weight"] == value).all()) for index in range(LAYERS))


def test_a_watcher_that_cannot_start_leaves_files_of_the_user_alone(in_file, tmp_path, monkeypatch):
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    tensors = in_file()
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="can't start new thread"):
        patched.setattr(threading.Thread, "start", fail)
        tensors.__enter__()
    tensors.__exit__(None, None, None)
    with (tmp_path / "users").open("w+b") as file:
        file.write(b"important")
        file.flush()
        assert torch.ones(1 << 20).sum() == 1 << 20
        assert (tmp_path / "users").read_bytes() == b"important"


def test_pages_of_other_files_do_not_count(allocator, in_file, tmp_path):
    path = tmp_path / "checkpoint"
    path.write_bytes(bytes(32 << 20))
    dropped = []
    with in_file(8 << 20) as tensors:
        tensors._allocator = SimpleNamespace(  # counts what the watcher does
            drop_file_pages=lambda: (dropped.append(1), allocator.drop_file_pages()), close_file=allocator.close_file
        )
        mapped = torch.from_file(str(path), shared=False, size=8 << 20)
        mapped.sum()
        while not dropped:
            time.sleep(0.001)
        count = len(dropped)
        for _ in range(20):
            time.sleep(0.005)
        assert len(dropped) <= count + 1
