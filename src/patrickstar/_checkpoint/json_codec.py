"""Plain data as JSON and back: numbers, text, containers, small tensors. Nothing that could run code.

What JSON has no word for is a dictionary of one entry, whose key begins with "$".
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
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_CONTAINERS: dict[str, type[Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_MAPPINGS: dict[str, type[Any]] = {"$dict": dict, "$counter": Counter, "$ordered": OrderedDict}


def dumps(value: Any, what: str) -> bytes:
    """Plain data as JSON. Raises CheckpointError, naming the place in `what`, for what is not plain."""
    try:
        return json.dumps(_encode(value, what), separators=(",", ":")).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{what} can't be said in plain data ({type(error).__name__}: {error})") from error


def loads(text: bytes, what: str) -> Any:
    """The data again. Raises CheckpointError, naming `what`, for anything but what `dumps` writes."""
    try:
        return _decode(json.loads(text))
    except Exception as error:  # whatever libraries raise for values of a wrong kind
        raise CheckpointError(f"{what} is not what a checkpoint holds ({type(error).__name__}: {error})") from error


def _encode(value: Any, where: str) -> Any:
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
        return _encode(value.item(), where)
    for name, kind in _MAPPINGS.items():
        if type(value) is kind:
            items = [[_encode(key, where), _encode(one, f"{where}[{key!r}]")] for key, one in value.items()]
            simple = kind is dict and all(type(key) is str and not key.startswith("$") for key in value)
            return dict(items) if simple else {name: items}
    if type(value) is list:
        return [_encode(one, f"{where}[{number}]") for number, one in enumerate(value)]
    for name, kind in _CONTAINERS.items():
        if type(value) is kind:
            return {name: [_encode(one, f"{where}[{number}]") for number, one in enumerate(value)]}
    if isinstance(value, int | float | str):  # an enumeration, say: its plain value
        for plain in (int, float, str):
            if isinstance(value, plain):
                return plain(value)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, and a checkpoint holds plain data alone (numbers, text, bytes, lists, "
        f"tuples, sets, dictionaries, tensors, arrays), since what else there is could only be pickled; leave it out, "
        f"or say it in plain data"
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if not key.startswith("$"):
        return {name: _decode(one) for name, one in value.items()}
    (inside,) = value.values()
    if key == "$bytes":
        return base64.b64decode(inside, validate=True)
    if key == "$tensor":
        dtype, shape, raw = _BY_NAME[inside[0]], _shape(inside[1]), base64.b64decode(inside[2], validate=True)
        if len(raw) != prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(raw)} bytes for a tensor {shape} of {dtype}")
        flat = (
            torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            if raw
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        return flat.view(dtype).view(shape)
    if key == "$array":
        if not _ARRAY.fullmatch(inside[0]):
            raise ValueError(f"there are no arrays of {inside[0]}")
        kind, shape, raw = np.dtype(inside[0]), _shape(inside[1]), base64.b64decode(inside[2], validate=True)
        if len(raw) != prod(shape) * kind.itemsize:
            raise ValueError(f"{len(raw)} bytes for an array {shape} of {kind}")
        return np.frombuffer(bytearray(raw), kind).reshape(shape) if raw else np.empty(shape, kind)
    if key in _MAPPINGS:
        return _MAPPINGS[key]({_decode(name): _decode(one) for name, one in inside})
    return _CONTAINERS[key](_decode(one) for one in inside)


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{value!r} is no shape")
    return tuple(value)
