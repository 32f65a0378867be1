"""Tensors say where they are made: a user's default device must not move what the library keeps on the host."""

import ast
from pathlib import Path

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
    lines = {path.relative_to(SOURCES): without_device(path.read_text()) for path in sorted(SOURCES.rglob("*.py"))}
    found = [f"{path}:{line}" for path, without in lines.items() for line in without]
    assert not found, f"without device=, a user's default device decides: {', '.join(found)}"
