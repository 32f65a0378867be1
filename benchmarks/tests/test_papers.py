"""Published figures of the papers: their sources, and the form in which they are compared."""

import re

from papers.__main__ import sections
from papers.figures import Figure, Section
from report import HERE, reference

SOURCE = re.compile(
    r"(Table|Figures?|section|pull request) \d|abstract|background|offload strategy|evaluation|chart of"
)


def test_every_published_figure_has_a_source_and_a_row_of_the_results():
    figures = [figure for section in sections().values() for figure in section.figures if figure is not None]
    rows = reference("papers_without_comparison")
    assert len(figures) > 100 and all(SOURCE.search(figure.source) for figure in figures)
    assert len(rows) > 10 and all(SOURCE.search(row["source"]) and row["published"] and row["reason"] for row in rows)
    page = (HERE / "results" / "papers-cpu.md").read_text()
    assert all(f"| {figure.source} | {figure.what} | " in page for figure in figures)
    assert all(" | ".join(row.values()) in page for row in rows)


def test_a_row_has_the_error_of_a_number_and_a_grid_one_field_for_each_figure():
    figure, words = Figure("Table 1", "speed", 2.0, lambda: 3), Figure("Table 1", "speed", "fast", 3)
    assert "| Table 1 | speed | 2 | 3 | +50 % |  |" in Section([figure]).table()
    assert "| Table 1 | speed |  | 2: 3 (+50 %) |  | fast: 3 |" in Section([figure, None, words], "abc").table()
