"""Managed parameters: their storage in chunks, their gradients, their shards across processes."""
