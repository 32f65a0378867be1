"""Summary of a training run."""

from dataclasses import dataclass

from patrickstar import StepStats


@dataclass(frozen=True)
class Summary:
    """Record of a run, complete or interrupted.

    ``loss_first`` and ``loss_last`` are means over ``loss_steps`` steps. ``tokens_per_s`` excludes the first step,
    which is traced, unless it is the only one.
    """

    model: str
    parameters: int
    machine: str
    device: str
    precision: str
    steps: int
    interrupted: bool
    unfinished_s: float
    """Seconds of the step that was interrupted."""
    minutes: float | None
    """Limit that ended the run before its last step, if one did."""
    loss_first: float
    loss_last: float
    loss_steps: int
    tokens_per_s: float
    elapsed_s: float
    model_data_bytes: int
    padding_bytes: int
    chunk_count: int
    chunk_numel: int
    device_budget_bytes: int
    host_budget_bytes: int
    stats: StepStats
    processes: int = 1
    tp: int = 1
    ep: int = 1
    replicas: int = 1
    activations: str = ""
    """What was chosen for activations; empty if the options name it."""
