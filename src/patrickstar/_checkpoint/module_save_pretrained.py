"""`module.save_pretrained` of a managed transformers model, whose files are in full precision."""

import json
from collections.abc import Collection
from pathlib import Path
from types import MethodType
from typing import Any

from torch import nn

from patrickstar._checkpoint.hf_export import common_dtype
from patrickstar._params.managed_param import ManagedParam


class SavePretrained:
    """Calls the model's own method, and corrects the dtype in config.json, which is that of the compute copies.

    `from_pretrained` loads all tensors in that dtype, so full precision would be lost without a word.

    Args:
        module: The managed model.
        dtype: Name of the dtype that represents all saved parameters, such as "float32".
    """

    def __init__(self, module: nn.Module, dtype: str) -> None:
        self._module, self._dtype = module, dtype

    def __call__(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module
        result = type(module).save_pretrained(module, save_directory, *args, **kwargs)
        path = Path(save_directory) / "config.json"
        # A state dict of the caller's has the caller's dtype.
        if kwargs.get("state_dict") is None and kwargs.get("is_main_process", True) and path.is_file():
            fields = json.loads(path.read_text())
            if "dtype" in fields:
                path.write_text(json.dumps(fields | {"dtype": self._dtype}, indent=2, sort_keys=True) + "\n")
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._module)]
        return MethodType(type(copied).save_pretrained, copied)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "save_pretrained")


def save_in_full_precision(module: nn.Module, managed_params: Collection[ManagedParam]) -> SavePretrained | None:
    """Return the method for a model whose saved parameters have another dtype than those that operators read."""
    saved = {each.full_dtype for each in managed_params if each.full_dtype.is_floating_point}
    computed = {each.chunk.dtype for each in managed_params if each.full_dtype.is_floating_point}
    if saved == computed or not hasattr(type(module), "save_pretrained"):
        return None
    return SavePretrained(module, common_dtype(saved))
