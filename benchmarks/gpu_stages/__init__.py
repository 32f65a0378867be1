"""The stages of `benchmarks/gpu.py`: each a module with a function `run(record, options)`."""
