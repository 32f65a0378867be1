"""Published figures beside ours: sections of a page, with a row for each figure or a grid of figures of one kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from report import shown, table

from patrickstar.errors import BudgetError

COLUMNS = ["source", "figure", "published", "ours", "error", "assumptions"]


@dataclass(frozen=True)
class Figure:
    """Published figure, and ours.

    Attributes:
        source: Table, figure or section of the paper that prints it.
        what: Measured quantity, with its unit.
        published: Its value, or its words.
        ours: Our value, or a function that computes it.
        note: Assumptions of ours, such as batch and length.
    """

    source: str
    what: str
    published: float | str
    ours: float | str | Callable[[], float]
    note: str = ""

    def computed(self) -> tuple[str, str]:
        """Return our value and its error in percent, each as far as there is one."""
        try:
            value = self.ours() if callable(self.ours) else self.ours
        except BudgetError:
            return "does not fit", ""
        if isinstance(value, str):
            return value, ""
        return f"{value:,.4g}", "" if isinstance(self.published, str) else error(value, self.published)


@dataclass(frozen=True)
class Section:
    """Table of the page.

    Attributes:
        columns: If there are some, those of a grid: each row has as many figures of one source. None is an empty field.
    """

    figures: Sequence[Figure | None]
    columns: Sequence[str] = ()

    def table(self) -> str:
        """Compute the figures and return them in Markdown."""
        width = len(self.columns) or 1
        rows = shown(self._row(self.figures[start : start + width]) for start in range(0, len(self.figures), width))
        columns = [*COLUMNS[:3], *self.columns] if self.columns else COLUMNS
        return table(rows, columns)

    def _row(self, figures: Sequence[Figure | None]) -> list[str]:
        given = [figure for figure in figures if figure is not None]
        alike = len({figure.published for figure in given}) == 1
        first = [given[0].source, given[0].what, _text(given[0].published) if alike else ""]
        if not self.columns:
            return [*first, *given[0].computed(), given[0].note]
        return [*first, *("" if figure is None else _cell(figure, alike) for figure in figures)]


def _cell(figure: Figure, alike: bool) -> str:
    ours, percent = figure.computed()
    return f"{'' if alike else f'{_text(figure.published)}: '}{ours}{f' ({percent})' if percent else ''}"


def _text(published: float | str) -> str:
    return published if isinstance(published, str) else f"{published:g}"


def error(ours: float, published: float) -> str:
    return f"{100 * (ours / published - 1):+.0f} %"
