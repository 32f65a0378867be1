"""JSON encoding of plain data: numbers, text, containers, small tensors; decoding never runs code.

A type that JSON lacks is encoded as an object with one key that begins with "$".
"""

import base64
import json
import re
from collections import Counter, OrderedDict
from math import prod
from typing import Any

import numpy as np
import torch

from patrickstar._checkpoint.safetensors_file import DTYPES
from patrickstar.errors import CheckpointError

_ARRAY = re.compile(r"[<>|=]?[biuf]\d{1,2}")
_DTYPE_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_CONTAINERS: dict[str, type[Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_MAPPINGS: dict[str, type[Any]] = {"$dict": dict, "$counter": Counter, "$ordered": OrderedDict}


def dumps(value: Any, label: str) -> bytes:
    """Encode plain data. Raises CheckpointError, naming the item within `label`, for any other type."""
    try:
        return json.dumps(_encode(value, label), separators=(",", ":")).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{label} cannot be encoded as JSON ({type(error).__name__}: {error})") from error


def loads(text: bytes, label: str) -> Any:
    """Decode the output of `dumps`. Raises CheckpointError, naming `label`, for any other text."""
    try:
        return _decode(json.loads(text))
    except Exception as error:  # libraries raise many types for invalid values
        raise CheckpointError(f"{label} is not valid checkpoint data ({type(error).__name__}: {error})") from error


def _encode(value: Any, path: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dtype in DTYPES:
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        data = base64.b64encode(flat.numpy().tobytes()).decode()
        return {"$tensor": [DTYPES[value.dtype], list(value.shape), data]}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$array": [value.dtype.str, list(value.shape), data]}
    if isinstance(value, np.generic):
        return _encode(value.item(), path)
    for name, kind in _MAPPINGS.items():
        if type(value) is kind:
            items = [[_encode(key, path), _encode(item, f"{path}[{key!r}]")] for key, item in value.items()]
            simple = kind is dict and all(type(key) is str and not key.startswith("$") for key in value)
            return dict(items) if simple else {name: items}
    if type(value) is list:
        return [_encode(item, f"{path}[{number}]") for number, item in enumerate(value)]
    for name, kind in _CONTAINERS.items():
        if type(value) is kind:
            return {name: [_encode(item, f"{path}[{number}]") for number, item in enumerate(value)]}
    if isinstance(value, int | float | str):  # a subclass, for example an enum member
        for plain in (int, float, str):
            if isinstance(value, plain):
                return plain(value)
    raise CheckpointError(
        f"{path} is a {type(value).__name__}; a checkpoint stores only plain data (numbers, text, bytes, lists, "
        f"tuples, sets, dictionaries, tensors, arrays), since other types would need pickle; leave it out or convert it"
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if not key.startswith("$"):
        return {name: _decode(item) for name, item in value.items()}
    (content,) = value.values()
    if key == "$bytes":
        return base64.b64decode(content, validate=True)
    if key == "$tensor":
        dtype = _DTYPE_BY_NAME[content[0]]
        flat, shape = _elements(content, dtype, "a tensor")
        return torch.from_numpy(flat).view(dtype).view(shape)
    if key == "$array":
        if not _ARRAY.fullmatch(content[0]):
            raise ValueError(f"arrays of {content[0]} are not supported")
        kind = np.dtype(content[0])
        flat, shape = _elements(content, kind, "an array")
        return flat.view(kind).reshape(shape)
    if key in _MAPPINGS:
        return _MAPPINGS[key]({_decode(name): _decode(item) for name, item in content})
    return _CONTAINERS[key](_decode(item) for item in content)


def _elements(content: Any, dtype: torch.dtype | np.dtype[Any], label: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the bytes and the shape of an encoded tensor or array."""
    shape = content[1]
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape!r} is not a shape")
    raw = bytearray(base64.b64decode(content[2], validate=True))
    if len(raw) != prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for {label} {tuple(shape)} of {dtype}")
    return np.frombuffer(raw, np.uint8), tuple(shape)
