"""Reader of TensorBoard's event files, and comparison with the log of JSON lines of the same run."""

from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from patrickstar._report.run_file import Run

FIELDS = {
    "train/loss": "loss",
    "train/learning_rate": "learning_rate",
    "train/gradient_norm": "gradient_norm",
    "time/step_s": "elapsed_s",
    "time/stall_s": "stall_s",
    "memory/device_peak_model_bytes": "device_peak_model_bytes",
    "memory/device_peak_non_model_bytes": "device_peak_non_model_bytes",
    "memory/host_peak_model_bytes": "host_peak_model_bytes",
    "memory/host_peak_non_model_bytes": "host_peak_non_model_bytes",
    "transfer/to_device_bytes": "h2d_bytes",
    "transfer/to_host_bytes": "d2h_bytes",
    "transfer/evictions": "evictions",
    "disk/read_bytes": "disk_read_bytes",
    "disk/written_bytes": "disk_write_bytes",
    "disk/stored_bytes": "disk_bytes",
    "collectives/gathered_bytes": "gathered_bytes",
    "collectives/reduced_bytes": "reduced_bytes",
    "staleness/mean_updates": "staleness",
    "staleness/peak_updates": "peak_staleness",
}
"""Field of the log's step with the value of each scalar, by tag."""


def scalars_in(directory: Path) -> dict[str, dict[int, float]]:
    """Return the values of each scalar by step, as TensorBoard shows them: without those that a later run replaced."""
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    found = {}
    for tag in events.Tags()["scalars"]:
        scalars = events.Scalars(tag)
        found[tag] = {event.step: event.value for event in scalars}
        assert len(found[tag]) == len(scalars), f"a step of {tag} was written twice"
    return found


def expected_scalars(run: Run, tags: set[str]) -> dict[str, dict[int, float]]:
    """Return what the event files of a run contain: the values of its log in single precision."""
    expected = {
        tag: {step["step"]: np.float32(step[field]) for step in run.steps if step[field] is not None}
        for tag, field in FIELDS.items()
        if tag in tags
    }
    rates = {step["step"]: np.float32(step["tokens"] / step["elapsed_s"]) for step in run.steps if step["tokens"]}
    return expected | ({"train/tokens_per_s": rates} if rates else {})
