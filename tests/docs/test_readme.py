"""The README is short, and its tables and its picture are what the scripts make of the committed results."""

import ast
from pathlib import Path

import pytest
import readme_table
import step_picture

from patrickstar._report.memory_curves import memory_curves
from patrickstar._report.run_file import read_run
from patrickstar._schedule.placement import Tier

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_it_is_read_in_a_minute():
    assert len(readme_table.README.read_text().splitlines()) < 100


def test_tables_are_those_of_the_results():
    text = readme_table.README.read_text()
    assert readme_table.with_tables(text) == text


def test_each_measured_row_has_a_limit():
    rows = list(readme_table.measured())
    assert len(rows) >= 9 and all(ours.strip("*") and limit for *_, ours, limit in rows)


def test_the_picture_is_that_of_the_recorded_step():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[plots]'")
    assert step_picture.draw(read_run(step_picture.LOG)) == step_picture.PICTURE.read_text()


def test_the_recorded_model_has_five_times_its_budget_and_stays_within():
    run = read_run(step_picture.LOG)
    budget_bytes = run.description["device_budget_bytes"]
    assert run.description["model_data_bytes"] > 5 * budget_bytes
    assert 0.8 * budget_bytes < memory_curves(run.timelines[-1], Tier.DEVICE).peak <= budget_bytes


def test_the_example_is_short():
    source = (EXAMPLES / "larger_than_budget.py").read_text()
    assert len(source.splitlines()) <= 60 and ast.get_docstring(ast.parse(source))
