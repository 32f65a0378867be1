"""Tensors say where they are made: a user's default device must not move what the library keeps on the host."""

import ast
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import patrickstar

SOURCES = Path(patrickstar.__file__).parent
# What `torch.set_default_device` and `with torch.device(...)` act on, as PyTorch lists it, and the older constructors.
FACTORIES = {function.__name__ for function in _device_constructors()} | {"Tensor", "UntypedStorage"}


def without_device(source: str) -> list[int]:
    """Return the lines of a file's calls of torch factories that don't name a device."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FACTORIES
        and ast.unparse(node.func.value).split(".")[0] == "torch"
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


def test_every_tensor_that_is_made_says_on_which_device():
    found = [
        f"{path.relative_to(SOURCES)}:{line}"
        for path in sorted(SOURCES.rglob("*.py"))
        for line in without_device(path.read_text())
    ]
    assert not found, f"without device=, a user's default device decides: {', '.join(found)}"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = torch.zeros(3)", [1]),
        ("x = torch.zeros(\n    3, dtype=torch.int8\n)\ny = torch.tensor([torch.ones(2)], device='cpu')", [1, 4]),
        ("x = torch.nested.nested_tensor([])", [1]),
        ("x = torch.empty(0, device=device), torch.empty_like(y), torch.frombuffer(b, dtype=t), np.zeros(3)", []),
    ],
)
def test_a_call_without_a_device_is_found(source, lines):
    assert without_device(source) == lines


def test_the_list_of_factories_is_pytorchs():
    assert {"empty", "empty_strided", "zeros", "ones", "full", "tensor", "arange", "randn", "as_tensor"} <= FACTORIES
    assert "empty_like" not in FACTORIES and "frombuffer" not in FACTORIES
