"""The example of several processes runs unchanged for a few steps."""

import runpy
from pathlib import Path

import pytest
from sampling import nightly

from . import ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def experts(words: list[str], steps: int) -> None:
    """Run the example in each of four processes."""
    budget_mib = 32
    options = ["--steps", str(steps), "--device-memory", f"{budget_mib}MiB", *words]
    losses, peak_bytes = runpy.run_path(str(EXAMPLES / "experts.py"))["main"](options)
    assert len(losses) == steps and losses[-1] < (0.9 if steps > 4 else 1) * losses[0]
    assert 0 < peak_bytes <= budget_mib << 20


@pytest.mark.long("an example of fixed size in four processes")
@pytest.mark.parametrize("words", [pytest.param([], marks=pytest.mark.slow), ["--tp", "2", "--ep", "4"]])
def test_experts(words):
    steps = 6 if nightly() else 3
    first, *others = ranks.run(4, experts, words=words, steps=steps)
    assert f"step {steps}: loss" in first.text and "of model data and a budget of 32MiB" in first.text
    assert not any(ended.text for ended in others), "rank 0 alone prints"
