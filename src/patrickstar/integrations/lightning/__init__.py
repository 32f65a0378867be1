"""Integration with Lightning: a strategy of its Trainer, and one of Fabric."""

from patrickstar.integrations.lightning._fabric_strategy import PatrickStarFabricStrategy
from patrickstar.integrations.lightning._strategy import PatrickStarStrategy

__all__ = ["PatrickStarFabricStrategy", "PatrickStarStrategy"]
