"""Lazy tensors read their elements when an operator needs them, and write them back when one changes them."""

import copy
import io
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from patrickstar._autograd.lazy_tensor import LazyTensor
from patrickstar.errors import ModelError

CPU = torch.device("cpu")


class CountedReads:
    """Elements in an ordinary tensor; counts reads."""

    name = "the stored tensor"
    lock = nullcontext()

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.version, self.reads = value, 0, 0

    def read(self, out=None):
        self.reads += 1
        return self.value.clone() if out is None else out.copy_(self.value)

    def write(self, value):
        self.value.copy_(value)
        self.version += 1


def lazy(value: torch.Tensor) -> tuple[LazyTensor, CountedReads]:
    stored = CountedReads(value)
    return LazyTensor(stored, tuple(value.shape), value.stride(), value.dtype, CPU), stored


@pytest.fixture(params=["row-major", "transposed"])
def pair(request):
    value = torch.arange(12.0).view(3, 4)
    return lazy(value if request.param == "row-major" else value.t())


METADATA = {
    "shape": lambda t: t.shape,
    "dtype": lambda t: t.dtype,
    "device": lambda t: t.device,
    "numel": lambda t: t.numel(),
    "size": lambda t: (t.size(), t.size(0)),
    "strides": lambda t: (t.stride(), t.is_contiguous(), t.storage_offset()),
    "nbytes": lambda t: (t.nbytes, t.element_size(), t.untyped_storage().nbytes()),
    "grad": lambda t: (t.grad, t.requires_grad, t.is_leaf, t.grad_fn),
    "kind": lambda t: (t.is_floating_point(), t.layout, isinstance(t, torch.Tensor)),
}


@pytest.mark.parametrize("query", METADATA.values(), ids=METADATA)
def test_metadata_is_that_of_the_elements_and_reads_nothing(query, pair):
    tensor, stored = pair
    assert query(tensor) == query(stored.value)
    assert stored.reads == 0


READS = {
    "norm": lambda t: t.norm(),
    "operator": lambda t: t * 2 + t,
    "function": lambda t: torch.linalg.vector_norm(t, 1.0),
    "index": lambda t: t[1],
    "to": lambda t: t.to(torch.bfloat16),
    "numpy": lambda t: torch.from_numpy(np.asarray(t).copy()),
    "list": lambda t: torch.tensor(t.tolist()),
    "iteration": lambda t: torch.stack([row * 1 for row in t]),
    "view": lambda t: t.t().reshape(-1)[2:],
    "bytes": lambda t: t.contiguous().view(torch.uint8).clone(),
    "foreach": lambda t: torch._foreach_norm([t, t.t()])[1],
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "text": lambda t: torch.tensor(list(repr(t).encode())),
}


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading(read, mode, pair):
    tensor, stored = pair
    with mode():
        found = read(tensor)
    assert torch.equal(read(stored.value), found)
    assert stored.version == 0


WRITES = {
    "mul_": lambda t: t.mul_(2),
    "augmented": lambda t: t.__iadd__(1),
    "copy_": lambda t: t.copy_(torch.ones_like(t)),
    "index": lambda t: t.__setitem__(1, 7),
    "mask": lambda t: t.__setitem__(t > 5, 0),
    "view": lambda t: t.t()[1].zero_(),
    "data": lambda t: t.data.clamp_(max=3),
    "view of a view": lambda t: t[1:].t()[:2].add_(5),
    "foreach": lambda t: torch._foreach_mul_([t], 3),
    "out": lambda t: torch.add(t, 1, out=t),
    "fill": lambda t: torch.nn.init.zeros_(t),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing(write, mode, pair):
    tensor, stored = pair
    expected = stored.value.clone()
    with mode():
        write(expected)
        write(tensor)
    assert torch.equal(expected, stored.value)
    assert stored.version == 1


def test_operators_below_the_python_interface_read_and_write():
    tensor, stored = lazy(torch.ones(3))
    target = torch.zeros(3)
    with torch._C.DisableTorchFunctionSubclass():
        target.copy_(tensor)
        tensor.mul_(2)
    assert target.tolist() == [1, 1, 1] and stored.value.tolist() == [2, 2, 2]


def test_the_address_holds_the_elements_and_follows_changes():
    tensor, stored = lazy(torch.arange(4.0))
    other, _ = lazy(torch.arange(4.0))
    address = tensor.untyped_storage().data_ptr()
    assert stored.reads == 0 and address != other.untyped_storage().data_ptr()
    assert tensor.data_ptr() == address and tensor[2:].data_ptr() == address + 8
    as_numpy = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 4).from_address(address))
    assert as_numpy.tolist() == [0, 1, 2, 3]
    reads = stored.reads
    assert tensor.sum() == 6 and stored.reads == reads, "elements at the address are not read again"
    tensor.add_(1)
    assert tensor.data_ptr() == address and as_numpy.tolist() == [1, 2, 3, 4]


def test_a_file_holds_plain_tensors_once():
    tensor, _ = lazy(torch.arange(1000.0))
    file = io.BytesIO()
    torch.save({"a": tensor, "tied": tensor}, file)
    assert file.tell() < 8000
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded["a"]) is torch.Tensor and loaded["a"].data_ptr() == loaded["tied"].data_ptr()


def test_it_can_not_become_a_parameter():
    tensor, _ = lazy(torch.ones(2))
    for use in (torch.nn.Parameter, lambda t: t.requires_grad_(True)):
        with pytest.raises(ModelError, match=r"the stored tensor is stored in chunks.*clone\(\) it first"):
            use(tensor)


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_empty_tensors_and_scalars(shape):
    tensor, stored = lazy(torch.ones(shape))
    assert torch.equal(tensor.clone(), stored.value)
    tensor.add_(1)
    assert torch.equal(stored.value, torch.full(shape, 2.0))
    assert pickle.loads(pickle.dumps(tensor)).shape == shape
    assert isinstance(tensor.data_ptr(), int)
