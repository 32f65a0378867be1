"""Simulation of training steps without executing operators: cost models, simulated hardware, reports."""
