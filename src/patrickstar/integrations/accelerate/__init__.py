"""Integration with Hugging Face accelerate: an Accelerator with the engine as backend."""

from patrickstar.integrations.accelerate._accelerator import Accelerator

__all__ = ["Accelerator"]
