"""Which chunk is where: fetches, evictions, prefetch, and the trace of the first step. Below modules and autograd."""
