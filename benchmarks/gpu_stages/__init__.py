"""Stages of `benchmarks/gpu.py`: modules with functions of `(record, options)`."""
