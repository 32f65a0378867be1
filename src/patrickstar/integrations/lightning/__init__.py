"""Integration with Lightning: a strategy of its Trainer."""

from patrickstar.integrations.lightning._strategy import PatrickStarStrategy

__all__ = ["PatrickStarStrategy"]
