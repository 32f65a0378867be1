"""Plans: whether a model fits a machine, how fast it trains there, and what would make it faster."""
