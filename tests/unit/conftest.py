"""Fixtures of several files."""

from fake_cuda import fake_cuda  # noqa: F401
