"""Command line: train, plan, export and examine the installation."""
