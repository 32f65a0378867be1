"""HTML page with figures: one file, which needs no network."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from patrickstar.errors import ConfigError

ASSETS = files("patrickstar._report") / "assets"

Figure = dict[str, Any]
"""Figure of Plotly as plain data. A color such as `@stall` is a name, for a color of the page's theme."""


def html_page(title: str, body: str, figures: Mapping[str, Figure]) -> str:
    """Return a page.

    Args:
        title: Title of the window.
        body: Content as HTML.
        figures: Figures by the key of their place in the body.
    """
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        css=_asset("page.css"),
        plotly=_asset("plotly-cartesian.min.js"),
        script=_asset("page.js"),
        figures=json.dumps(figures, separators=(",", ":")).replace("</", "<\\/"),
        body=body,
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def write_page(text: str, path: Path) -> None:
    """Write a page. Raise ConfigError if the file can't be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the page {path} can't be written: {error.strerror}; choose another file") from error


def cards(texts: Iterable[tuple[str, str, str]]) -> str:
    """Return figures in large type, each of a name, a value and a note."""
    return '<dl class="cards">' + "".join(map(_card, texts)) + "</dl>"


def _card(texts: tuple[str, str, str]) -> str:
    name, value, note = map(html.escape, texts)
    return f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>"


def picture(key: str, title: str, explanation: str) -> str:
    """Return the place of a figure, with its title and a sentence about it."""
    place = f'<div class="picture" data-figure="{key}" role="img" aria-labelledby="{key}-title"></div>'
    return (
        f'<figure><figcaption><h2 id="{key}-title">{html.escape(title)}</h2><p>{html.escape(explanation)}</p>'
        f'</figcaption><ul class="key"></ul>{place}</figure>'
    )


def table(columns: Iterable[str], rows: Iterable[Sequence[Any]], name: str) -> str:
    """Return a table that scrolls on a narrow screen."""
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{name}"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )
