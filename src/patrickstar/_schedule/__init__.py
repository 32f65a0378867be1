"""Scheduling of transfers and placement, decided from a trace and budgets. Does not import torch."""
