"""Walk of a parameter: files and Python calls of the package that its operator, window, gradient and update take.

The ceilings are what the code takes today; a change may only lower them.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from toys import inputs, layers, train

import patrickstar as ps
from patrickstar._autograd.gradient_hooks import GradientHooks
from patrickstar._autograd.interceptor import Interceptor
from patrickstar._step.optimizer_step import OptimizerStep

SOURCES = str(Path(ps.__file__).parent)
EVENTS = {
    "operator": (Interceptor, "operate"),
    "window": (Interceptor, "enter_backward"),
    "gradient": (GradientHooks, "on_gradient"),
    "update": (OptimizerStep, "update_chunk"),
}
CEILINGS = {
    # Budget for a third of the parameters: each operator fetches a chunk and evicts one.
    "planned": ("900KiB", {"operator": (22, 157), "window": (22, 123), "gradient": (9, 22)}, 37),
    "resident": ("64MiB", {"operator": (4, 19), "window": (5, 10), "gradient": (8, 16)}, 28),
}
"""Budget; most files and calls of one event; most files of all events of a parameter together."""


class Walk:
    """Records the files of the package in which functions run during the outermost event of each kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.walks: dict[str, list[list[str]]] = {}
        self._files: list[str] | None = None
        for event, (cls, name) in EVENTS.items():
            monkeypatch.setattr(cls, name, self._recorded(event, getattr(cls, name)))

    def _recorded(self, event: str, call: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._files is not None:
                return call(*args, **kwargs)
            self._files = []
            before = sys.getprofile()
            sys.setprofile(self._note)
            try:
                return call(*args, **kwargs)
            finally:
                sys.setprofile(before)
                self.walks.setdefault(event, []).append(self._files)
                self._files = None

        return recorded

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(SOURCES) and self._files is not None:
            self._files.append(path)

    def longest(self, event: str) -> list[str]:
        """Return the walk of the event that crosses most files."""
        return max(self.walks[event], key=lambda files: len(set(files)))


@pytest.mark.parametrize("place", CEILINGS)
def test_no_event_takes_more_files_or_calls_than_before(place, monkeypatch):
    budget, ceilings, together = CEILINGS[place]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = layers(256, 12, nn.GELU)
    config = ps.Config(device="cpu", device_memory=budget, host_memory="64MiB", precision="bf16")
    with ps.Engine(model, config, meter=ps.testing.NoMeter()) as engine:  # what a meter counts depends on earlier tests
        train(engine, inputs(5, 256), max_norm=1.0)
        walk = Walk(monkeypatch)
        train(engine, inputs(1, 256), max_norm=1.0)
    moved = engine.stats.last.h2d_bytes > 0
    assert moved == (place == "planned")
    for event, (files, calls) in ceilings.items():
        walked = walk.longest(event)
        found = len(set(walked)), max(map(len, walk.walks[event]))
        assert found[0] <= files and found[1] <= calls, f"{event}: {found[0]} files, {found[1]} calls: {set(walked)}"
    union = set().union(*(walk.longest(event) for event in EVENTS))
    assert len(union) <= together, f"{len(union)} files: {sorted(union)}"
