"""Output on the console: plain text and named rows."""

from rich.console import Console
from rich.text import Text


def print_text(console: Console, text: str) -> None:
    """Print text neither cut, colored nor wrapped, except by the terminal: a file has no width."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def print_row(console: Console, name: str, text: str, advice: str | None = None) -> None:
    """Print a name and a text, and advice on the next line."""
    console.print(Text.assemble((f"{name:<16}", "bold"), text), soft_wrap=True)
    if advice is not None:
        console.print(Text.assemble(" " * 16, ("-> ", "yellow"), advice), soft_wrap=True)
