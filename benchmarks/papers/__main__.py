"""Compare the figures that the papers of PatrickStar, ZeRO-Offload and Angel-PTM print with ours.

python benchmarks/papers
Nothing is measured. Writes results/papers-cpu.md; seven dry runs take some minutes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import publish_text, reference, table

from papers import angel_ptm, patrickstar_editions, zero_offload
from papers.figures import Section


def sections() -> dict[str, Section]:
    """Return the sections of the page, by their names in its text."""
    return patrickstar_editions.sections() | zero_offload.sections() | angel_ptm.sections()


def main() -> None:
    """Print the page and write it."""
    tables = {name: section.table() for name, section in sections().items()}
    reasons = table(reference("papers_without_comparison"))
    publish_text("papers-cpu", **tables, peak_tflops=angel_ptm.PEAK_TFLOPS, without_comparison=reasons)


if __name__ == "__main__":
    main()
