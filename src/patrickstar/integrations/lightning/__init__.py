"""Integration with Lightning: strategies of its Trainer and of Fabric with the engine as backend."""

from typing import TYPE_CHECKING

from patrickstar.integrations._on_first_use import on_first_use

if TYPE_CHECKING:
    from patrickstar.integrations.lightning._checkpoint_folder import StoredWeights
    from patrickstar.integrations.lightning._fabric_strategy import PatrickStarFabricStrategy
    from patrickstar.integrations.lightning._strategy import PatrickStarStrategy

__all__ = ["PatrickStarFabricStrategy", "PatrickStarStrategy", "StoredWeights"]

LIGHTNING = {"lightning": "2.6"}

__getattr__ = on_first_use(
    __name__,
    {
        "PatrickStarFabricStrategy": ("_fabric_strategy", LIGHTNING),
        "PatrickStarStrategy": ("_strategy", LIGHTNING),
        "StoredWeights": ("_checkpoint_folder", {}),
    },
)
