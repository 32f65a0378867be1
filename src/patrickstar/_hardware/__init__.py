"""The machine: accelerators, allocators, meters, worker threads, and what is in flight on them."""
