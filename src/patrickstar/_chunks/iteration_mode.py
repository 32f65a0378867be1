"""Modes of an iteration: what the tracer knows about it."""

from enum import Enum


class Mode(Enum):
    """Source of the tracer's knowledge about the current iteration."""

    DEMAND = "on-demand iteration: fetch on access, measure at every moment"
    TRACE = "traced iteration: as on demand, and record a trace"
    PLAN = "planned iteration: follow the trace of an earlier one"
    RESIDENT = "resident iteration: all parameters fit beside the trace's peak and stay on the device; no moments"
