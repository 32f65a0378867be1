"""Interception of parameter accesses: tensor subclass, autograd hooks, activation offload."""
