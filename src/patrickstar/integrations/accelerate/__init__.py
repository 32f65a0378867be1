"""Integration with Hugging Face accelerate: an Accelerator with the engine as backend."""

from typing import TYPE_CHECKING

from patrickstar.integrations._on_first_use import on_first_use

if TYPE_CHECKING:
    from patrickstar.integrations.accelerate._accelerator import Accelerator

__all__ = ["Accelerator"]

__getattr__ = on_first_use(__name__, {"Accelerator": ("_accelerator", {"accelerate": "1.15"})})
