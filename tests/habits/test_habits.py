"""Habits of PyTorch users: the same result as plain PyTorch, full precision, or an error that names the matter."""

import re
from pathlib import Path

import pytest
import torch

from patrickstar.testing import assert_same_bits

from . import gradients, models, saving, weights
from .registry import EXACT, HABITS, REFUSED, SAME, Habit, Plain, managed, train

# PyTorch's own, about its checkpoints without a process group and about what its compiler imports.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
DOCS = Path(__file__).parents[2] / "docs" / "habits.md"
assert gradients and models and saving and weights


def table() -> str:
    """Return the table of docs/habits.md."""
    lines = ["| topic | you write | result |", "|---|---|---|"]
    return "\n".join(lines + [f"| {habit.topic} | `{habit.code}` | {habit.result} |" for habit in HABITS])


def of(result: str):
    chosen = [habit for habit in HABITS if habit.result == result]
    return pytest.mark.parametrize("habit", chosen, ids=[habit.code for habit in chosen])


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    return one_thread


@of(SAME)
def test_the_bits_are_those_of_plain_pytorch(habit: Habit):
    plain, engine = Plain(), managed("fp32")
    results = []
    for trainer in (plain, engine):
        torch.manual_seed(1)
        results.append([value.detach().clone() for value in habit.script(trainer)])
    assert_same_bits(*results, "results")
    assert_same_bits(dict(plain.module.state_dict()), engine.state_dict(), "parameters")
    engine.close(keep=False)


@of(EXACT)
def test_nothing_is_rounded(habit: Habit, tmp_path):
    engine = managed("bf16")
    train(engine)
    habit.script(engine, tmp_path)
    engine.close(keep=False)


@of(REFUSED)
def test_it_is_refused_by_name(habit: Habit, tmp_path):
    engine = managed("bf16")
    train(engine)
    before = engine.state_dict()
    with pytest.raises(Exception) as caught:
        habit.script(engine, tmp_path)
    assert re.search(habit.pattern, str(caught.value), re.DOTALL), str(caught.value)
    if "head" not in habit.pattern and "optimizer.step" not in habit.code:
        assert_same_bits(before, engine.state_dict(), "parameters after the refusal")
    engine.close(keep=False)


def test_the_documentation_lists_them():
    assert len(HABITS) >= 60
    assert table() in DOCS.read_text(), f"{DOCS} has another table; it should be:\n{table()}"
