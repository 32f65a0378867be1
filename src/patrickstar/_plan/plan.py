"""Plan: a prediction as text, as a page, and in a notebook."""

from html import escape
from pathlib import Path

from patrickstar._plan.plan_page import plan_page
from patrickstar._plan.plan_text import plan_text
from patrickstar._plan.prediction import Prediction
from patrickstar._report.html_page import write_page

NOTEBOOK_HEIGHT = 900
"""Height of a plan in a notebook, in pixels."""


class Plan(Prediction):
    """Plan of a model on a machine: `print` shows it as text, a notebook as a page."""

    def write_html(self, path: Path | str) -> None:
        """Write the plan to the file `path`, as a page that needs no network. Raise ConfigError if it can't be."""
        write_page(plan_page(self), Path(path))

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        """Return the page in a frame, since notebooks remove the scripts of other output."""
        return f'<iframe srcdoc="{escape(plan_page(self))}" width="100%" height="{NOTEBOOK_HEIGHT}"></iframe>'
