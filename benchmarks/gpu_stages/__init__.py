"""Programs of the calls of `benchmarks/gpu.py`: modules with functions of `(record, options)`."""
