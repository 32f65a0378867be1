"""Chunk memory: tiers, budgets, transfers and meters. Independent of modules and autograd."""
