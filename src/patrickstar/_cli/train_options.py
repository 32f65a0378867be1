"""Options of ``patrickstar train``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class TrainOptions:
    """Options of ``patrickstar train``, by their names on the command line."""

    data: tuple[Path, ...]
    model: str
    vocab_size: int | None
    sequence: int
    batch: int
    accumulation: int
    steps: int
    minutes: float | None
    lr: float
    warmup_steps: int
    weight_decay: float
    max_norm: float
    precision: Literal["auto", "bf16", "fp16", "fp32"]
    device: Literal["auto", "cpu", "cuda"]
    device_memory: str | None
    host_memory: str | None
    disk: Path | None
    disk_capacity: str | None
    packed: bool
    durable: bool
    chunk_size: str
    activation_checkpointing: bool
    checkpointing_share: str | None
    activation_offload: bool
    tiled_loss: bool
    tiled_mlp: bool
    in_backward: bool
    delay_from: int | None
    lock_free_from: int | None
    max_staleness: int
    update_log: Path | None
    replay: Path | None
    tp: int
    ep: int
    replicas: int
    seed: int
    log: Path | None
    tensorboard: Path | None
    save_every: int
    save_to: Path | None
    keep: int | None
    resume: Path | None
    quiet: bool
