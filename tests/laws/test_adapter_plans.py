"""Plans of models with adapters have the bytes of runs: LoRA and QLoRA, in 16 bits and fp32, on every tier."""

import gc
from dataclasses import dataclass

import pytest
from adapter_plans import DTYPES, sample, with_adapters
from hypothesis import strategies as st
from sampling import drawn
from torch import nn
from toys import update
from transformers import LlamaConfig
from transformers.utils import logging

import patrickstar as ps
from patrickstar._perf_model.machine_spec import DiskDrive, Host, Machine

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
VOCABULARY = 320
BYTES = ("device_peak_model_bytes", "device_peak_non_model_bytes", "host_peak_model_bytes", "disk_bytes")
TRANSFERS = ("h2d_bytes", "d2h_bytes")
AMPLE_BYTES = 1 << 28
STEPS = 3
"""A step without a plan, the first planned one, and one that begins where a planned one ends."""
MOST_STEPS = 10
"""Frozen chunks that the first steps left without a copy on the host are written there once more, when evicted."""


@dataclass(frozen=True)
class Draw:
    """A small Llama with adapters, a batch, and the part of the memory of its model data that a computer has."""

    layers: int
    width: int
    ffn: int
    tied: bool
    rank: int
    quantized: bool
    precision: str
    checkpointing: bool
    batch: int
    sequence: int
    room: float | None
    disk: bool

    def build(self) -> nn.Module:
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=self.tied,
            use_cache=False,
        )
        return with_adapters(config, self.precision, self.rank, self.quantized)

    def memory(self, model: nn.Module) -> int:
        """Return the bytes of the computer's memory; of its device budget, activations take some."""
        if self.room is None:
            return AMPLE_BYTES
        states = 12 * sum(param.numel() for param in model.parameters() if param.requires_grad)
        activations = 64 * self.batch * self.sequence * (2 * self.width + self.ffn)
        return int(self.room * (sum(param.nbytes for param in model.parameters()) + states + activations))


settled = st.builds(
    Draw,
    layers=st.integers(1, 3),
    width=st.sampled_from([64, 128, 256]),
    ffn=st.sampled_from([128, 320, 512]),
    tied=st.booleans(),
    rank=st.sampled_from([1, 4, 16]),
    quantized=st.booleans(),
    precision=st.sampled_from(sorted(DTYPES)),
    checkpointing=st.booleans(),
    batch=st.integers(1, 3),
    sequence=st.sampled_from([8, 32, 64]),
    room=st.none() | st.floats(1.0, 2.5),
    disk=st.booleans(),
)


def planned(model: object, draw: Draw, memory: int, **options) -> ps.Plan:
    """Plan for a machine that is this one, with less memory and with rates that do not matter."""
    machine = Machine(
        name="a small computer",
        source="a test",
        host=Host(memory=memory, memory_bandwidth=2e10, cores=2, matmul_tflops=0.1, fp32_tflops=0.1),
        disk=DiskDrive(capacity=1 << 34, read=1e9, write=1e9) if draw.disk else None,
        budgets=True,
        measured=True,
    )
    options |= {"batch": draw.batch, "activation_checkpointing": draw.checkpointing, "precision": draw.precision}
    return ps.plan(model, machine=machine, **options)


def run(model: nn.Module, draw: Draw, report, folder) -> tuple[ps.StepStats, int, int]:
    """Train within a plan's budgets until steps move alike; return the last one's bytes, and the parameters'."""
    if draw.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = ps.Config(
        device="cpu",
        precision=draw.precision,
        device_memory=report.device_budget_bytes,
        host_memory=report.host_budget_bytes,
        disk=folder if draw.disk else None,
    )
    gc.collect()  # an engine of another test that is released during a step would allocate tensors
    with ps.Engine(model, config) as engine:
        moved: list[tuple[int, ...]] = []
        while len(moved) < STEPS or moved[-1] != moved[-2]:
            assert len(moved) < MOST_STEPS, moved
            batch = sample(draw.batch, draw.sequence, VOCABULARY)  # a data loader delivers new tensors at each step
            update(engine, engine(**batch).loss)
            moved.append(tuple(getattr(engine.stats.last, name) for name in TRANSFERS))
        chunks = sum(chunk.nbytes for chunk in engine.inspect().chunks)
        return engine.stats.last, chunks, engine.layout.padding_bytes


@pytest.fixture(autouse=True)
def _no_avx512_kernels(monkeypatch):
    """On CPUs with AVX-512 plain layers use other kernels, and fail if they are as small as here."""
    logging.disable_progress_bar()
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


@pytest.mark.long("a draw is traced, dry-run with measured operators, and trained")
@drawn(20, settled, fast=1)
def test_a_plan_of_adapters_has_the_bytes_of_a_run(tmp_path_factory, draw):
    model, batch = draw.build(), sample(draw.batch, draw.sequence, VOCABULARY)
    try:
        plan = planned(model, draw, draw.memory(model), sample=batch)
    except ps.errors.BudgetError:
        plan = planned(model, draw, AMPLE_BYTES, sample=batch)
    last, chunks, padding = run(model, draw, plan.dry_run, tmp_path_factory.mktemp("disk"))
    assert plan.best.model_data_bytes == chunks - padding
    for name in BYTES + (() if draw.disk else TRANSFERS):
        assert getattr(plan.dry_run.stats, name) == getattr(last, name), name
