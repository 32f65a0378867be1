"""The command ``patrickstar report``: a page that shows what a run did."""

from pathlib import Path

from rich.console import Console

from patrickstar._cli.console import print_text
from patrickstar._layout.byte_size import format_size
from patrickstar._report.page import write_report
from patrickstar._report.run_file import read_run


def report(log: Path, output: Path | None, compare: Path | None, console: Console) -> None:
    """Write the page of a run. Raise ConfigError if a log can't be read, or the page can't be written."""
    runs = [read_run(path) for path in (log, compare) if path is not None]
    target = log.with_suffix(".html") if output is None else output
    write_report(runs, target)
    print_text(console, f"{target} ({format_size(target.stat().st_size)}): open it in a browser")
