"""Integration with Lightning: strategies of its Trainer and of Fabric with the engine as backend."""

from patrickstar.integrations.lightning._checkpoint_folder import StoredWeights
from patrickstar.integrations.lightning._fabric_strategy import PatrickStarFabricStrategy
from patrickstar.integrations.lightning._strategy import PatrickStarStrategy

__all__ = ["PatrickStarFabricStrategy", "PatrickStarStrategy", "StoredWeights"]
