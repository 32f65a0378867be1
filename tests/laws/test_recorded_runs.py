"""Recorded runs: the same bits as plain PyTorch, and the same bytes moved as before, over tiers and policies.

`PYTHONPATH=tests python -m laws.test_recorded_runs` records them anew, in `recorded_runs.json`: do that only after a
change that is meant to move other bytes.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from seeded import compared
from toys import Shape, batches, train

import patrickstar as ps

from .models import config, smallest_device_bytes
from .tiers import PAGE_BYTES, WIDTH, Room, on_disk

FAST = (3, 7, 12, 21)
RUNS = 50
RECORD = Path(__file__).with_name("recorded_runs.json")
DECISIONS = ("evictions", "device_peak_model_bytes")
TRAFFIC = ("h2d_bytes", "d2h_bytes")
"""Bytes moved; those of a run with a disk depend on how far its pages are when a chunk is needed."""


@dataclass(frozen=True)
class Run:
    """A run of four batches, drawn from its number."""

    number: int

    def decisions(self) -> dict[str, int]:
        """Compare the run with plain PyTorch, bit for bit; return what it moved and held, over all steps."""
        draw = random.Random(self.number)
        kinds = draw.choices(["mlp", "attention", "plain"], k=draw.randint(1, 4))
        tier = draw.choice(["device", "host", "disk"])
        shape = Shape(tuple(kinds), *(draw.random() < 0.5 for _ in range(3)), width=WIDTH if tier == "disk" else 8)
        precision, chunk_size = draw.choice(["bf16", "fp16", "fp32"]), draw.choice([1024, 2800, 9000, "auto"])
        update = ps.Delayed(after=draw.randint(1, 3)) if draw.random() < 0.25 else None
        in_backward = update is None and precision != "fp16" and draw.random() < 0.3
        loop: dict[str, Any] = {
            "accumulation": 1 if update else draw.randint(1, 2),
            "max_norm": None if in_backward else draw.choice([None, 0.1]),
            "update": in_backward,
        }
        options, spare_bytes = config(precision, chunk_size, update=update), draw.choice([0, 2000, 12000])
        with TemporaryDirectory() as folder:
            if tier == "disk":
                options = on_disk(shape.build, options, folder, batches(1)[0], Room(spare_bytes, 4 * spare_bytes))
            elif tier == "host":
                least = smallest_device_bytes(shape, chunk_size, precision)
                options = options.model_copy(update={"device_memory": least + spare_bytes})
            script, label = lambda trainer: train(trainer, batches(4), **loop), f"run {self.number}: "
            pages = {"page_bytes": PAGE_BYTES} if tier == "disk" else {}
            with compared(shape.build, options, script, label, **pages) as engine:
                return {
                    name: getattr(engine.stats.total, name)
                    for name in (*DECISIONS, *(TRAFFIC if tier != "disk" else ()))
                }


NUMBERS = [pytest.param(number, marks=() if number in FAST else pytest.mark.slow) for number in range(RUNS)]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_run_decides_as_when_it_was_recorded(number):
    assert Run(number).decisions() == json.loads(RECORD.read_text())[number]


if __name__ == "__main__":
    record = [Run(number).decisions() for number in range(RUNS)]
    RECORD.write_text("[\n" + ",\n".join(json.dumps(run) for run in record) + "\n]\n")
