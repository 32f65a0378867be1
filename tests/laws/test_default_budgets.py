"""Law: open budgets leave memory free and block no other; budgets that the check before training accepts suffice."""

import random
import re
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from probes import set_ram
from sampling import draws, fixed_draws, nightly
from test_feasibility import budgets, refusal, shares
from torch import nn
from toys import mean_square, train

import patrickstar as ps
from patrickstar._hardware.ram import Ram, RamLimit
from patrickstar._layout.chunk_mapping import ParamSpec, build_layout
from patrickstar._layout.schema import schema_for

DRAWS_PER_TEST = 10
MOST_TRIES = 100
"""Draws for one that is refused, at most."""
NAMED = re.compile(r"Each of these alone is enough, verified by dry runs: (.*?)\. The dry run was refused")
PAIRS = re.compile(r"device_memory=(\d+)(?: bytes \([^)]*\))? with (?:this )?host_memory(?:=| of )(\d+) bytes")

limits = st.builds(
    lambda total, share: RamLimit(total, int(total * share)), st.integers(1, 1 << 44), st.floats(-0.1, 1.0)
)


@given(st.lists(limits, min_size=1, max_size=4), st.integers(0, 1 << 44))
def test_defaults_leave_a_tenth_or_half_of_the_rest_free(found, given_bytes):
    ram = Ram(tuple(found))
    default_bytes = ram.default_bytes(given_bytes)
    assert default_bytes >= 0
    rests = [(limit.total_bytes, limit.available_bytes - given_bytes) for limit in found]
    assert all(
        rest - default_bytes >= min(total // 10, rest // 2) if rest > 0 else not default_bytes for total, rest in rests
    )
    assert default_bytes == 0 or any(rest - default_bytes == min(total // 10, rest // 2) for total, rest in rests), (
        "more could be taken"
    )


class Model(nn.Module):
    """Layers that widen and narrow again; its output is the loss."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        triples = ((nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(blocks))
        self.layers = nn.Sequential(*chain.from_iterable(triples))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return mean_square(self.layers(batch))


@dataclass(frozen=True)
class Draw:
    """A model, a batch and a device budget, beside an open host budget on a machine that other programs use."""

    width: int
    blocks: int
    rows: int
    device_bytes: int
    total_bytes: int
    available_bytes: int
    sampled: bool
    """Whether a sample lets the refusal come before training."""

    @classmethod
    def of(cls, seed: int) -> "Draw":
        choice = random.Random(seed)
        width, blocks, rows = choice.choice([128, 192, 256]), choice.randint(1, 3), choice.choice([64, 256, 512])
        # The largest operator reads 4 * width * width elements, and writes up to 4 * width * rows.
        device_bytes = 4 * width * int(4 * width + choice.uniform(0.5, 8) * rows)
        model_bytes = 16 * blocks * 8 * width * width
        total_bytes = int((model_bytes + device_bytes) * choice.uniform(1.1, 12))
        available_bytes = int(total_bytes * (1 - choice.uniform(0, 0.8)))
        return cls(width, blocks, rows, device_bytes, total_bytes, available_bytes, choice.random() < 0.5)

    def train(
        self, *, rows: int | None = None, passes: int = 1, steps: int = 3, advised: bool = False, **options: object
    ) -> str:
        """Create an engine and train; return the message of a refusal, empty without one. `advised`: with advice."""
        config = ps.Config(**{"device": "cpu", "precision": "fp32", "device_memory": self.device_bytes} | options)
        batch, build = torch.ones(rows or self.rows, self.width), partial(Model, self.width, self.blocks)
        engine = None
        try:
            if advised:
                engine, _ = ps.initialize(build, config, sample=batch if self.sampled else None)
            else:
                engine = ps.Engine(build, config)
            train(engine, [(batch,)] * steps * passes, accumulation=passes)
        except ps.errors.BudgetError as error:
            return str(error)
        finally:
            if engine is not None:
                engine.close(keep=False)
        return ""


def settings_of(message: str, draw: Draw, directory: Path) -> dict[str, dict[str, object]]:
    """Return the options of each setting that a refusal names, by its text."""
    others = {"activation_offload=True": {"activation_offload": True}, "disk=ps.Disk(directory)": {"disk": directory}}
    settings: dict[str, dict[str, object]] = {}
    for text in found[1].split("; ") if (found := NAMED.search(message)) else []:
        if budget := re.fullmatch(r"(device_memory|host_memory)='(\d+MiB)'", text):
            settings[text] = {budget[1]: budget[2]}
        elif batch := re.fullmatch(rf"(?:(\d+) passes per step with )?a batch of (\d+) in place of {draw.rows}", text):
            settings[text] = {"rows": int(batch[2]), "passes": int(batch[1] or 1)}
        else:
            settings[text] = others[text]
    for device, host in PAIRS.findall(message):  # for the model data, without activations
        if int(device) + int(host) <= draw.available_bytes:
            (chunk,) = re.findall(r"chunk_size=(\d+)", message)
            budgets = {"device_memory": int(device), "host_memory": int(host), "chunk_size": int(chunk)}
            settings[f"{device} and {host} bytes"] = budgets | {"steps": 0}
    return settings


@pytest.mark.parametrize("first", range(0, 200 if nightly() else 10, DRAWS_PER_TEST))
def test_every_setting_that_a_refusal_names_suffices_beside_open_budgets(first, monkeypatch, tmp_path, one_thread):
    number, seed = 0, first * MOST_TRIES
    while number < draws(DRAWS_PER_TEST):
        draw, seed = Draw.of(seed), seed + 1
        set_ram(monkeypatch, draw.available_bytes, draw.total_bytes)
        if not (message := draw.train(advised=True)):
            continue
        number += 1
        settings = settings_of(message, draw, tmp_path)
        for text, options in settings.items():
            refused = draw.train(**options)
            assert not refused, f"seed {seed - 1}: {text} was named in {message!r}, and refused: {refused}"
        if not any("device_memory" in options for options in settings.values()):
            for share in (0.25, 0.5, 0.75, 1):
                nbytes = draw.device_bytes + int(share * (draw.available_bytes - draw.device_bytes))
                assert draw.train(device_memory=nbytes), f"seed {seed - 1}: {nbytes} suffice: {message}"


@fixed_draws(50)(st.lists(st.integers(1, 32), min_size=2, max_size=7), shares, shares)
def test_any_budgets_that_pass_the_check_can_be_trained_with(widths, device_share, host_share):
    """Train a chain of layers, each in its own chunk."""
    schema, pairs = schema_for("bfloat16", trained=True), list(pairwise(widths))
    params = [ParamSpec(f"p{i}", one * other, schema) for i, (one, other) in enumerate(pairs)]
    case = build_layout(params, 1), [{param.name} for param in params]
    device, host = budgets(case, device_share, host_share)
    if refusal(case, device, host) is None:
        config = ps.Config(device="cpu", device_memory=device, host_memory=max(1, host), chunk_size=2)
        model = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairs))
        with ps.Engine(model, config, meter=ps.testing.NoMeter()) as engine:
            train(engine, [(torch.ones(1, widths[0]),)] * 2)
