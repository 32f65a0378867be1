"""The command line: trains a causal language model on text, under byte budgets."""
