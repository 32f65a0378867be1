"""The notebooks run from the first cell to the last, without an error, and hold no outputs."""

import os
import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PATHS = [pytest.param(path, id=path.stem) for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
PARAMETERS = "# Parameters of this notebook."


@pytest.mark.parametrize("path", PATHS)
def test_a_notebook_begins_with_parameters_and_holds_no_outputs(path):
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert code[0].source.startswith(PARAMETERS)
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.parametrize("path", PATHS)
def test_pages_that_a_notebook_names_exist(path):
    links = re.findall(r"\]\(([^)#:]+?\.\w+)\)", path.read_text())
    assert links and all((path.parent / link).exists() for link in links)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_notebook_runs(path, tmp_path):
    execute(path, tmp_path)


def execute(path: Path, folder: Path, parameters: str = "") -> nbformat.NotebookNode:
    """Run all cells of a notebook in a folder. Code in `parameters` runs after the cell of the notebook's own."""
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    first = next(place for place, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells.insert(first + 1, nbformat.v4.new_code_cell(parameters))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    client = nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    return notebook
