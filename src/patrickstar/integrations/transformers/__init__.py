"""Models of the transformers library: built without memory, filled from local folders of safetensors."""

from patrickstar.integrations.transformers.load import from_pretrained

__all__ = ["from_pretrained"]
