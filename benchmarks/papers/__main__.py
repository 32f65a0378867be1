"""Compare the figures that the papers of PatrickStar, ZeRO-Offload and Angel-PTM print with ours.

python benchmarks/papers
Nothing is measured. Writes results/papers-cpu.md; seven dry runs take some minutes.
"""

import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import HERE, RESULTS, table

from papers import angel_ptm, patrickstar_editions, zero_offload

INTRO = """# papers

Figures that the papers of PatrickStar (arXiv 2108.05818), ZeRO-Offload (arXiv 2101.06840) and Angel-PTM (arXiv
2303.02868) print, and ours for the same machine, with the error relative to the published ones. Machine specs cite the
source of each rate: three of one machine are fitted to a chart of PatrickStar ([published](published.md)), none to the
papers. Values that only a picture shows were not read. The last section has what is not compared, and why.

- The *estimate* is that of `patrickstar plan`: a linear program for all GPUs, which share host memory and links, with
  full overlap, products at the rate of large ones, recomputation, and nothing else that takes time. It says what this
  engine could reach at best, and does not simulate the other systems: where it is far above a published figure, that
  system waits for something, or its operators are slower.
- The *dry run* is this engine with clipped gradients and the operators that transformers' models execute.
- The *original policy* is a simulation of PatrickStar itself (`patrickstar_v043/simulation.py`).
"""


def main() -> None:
    """Print the page and write it."""
    sections = [section for paper in (patrickstar_editions, zero_offload, angel_ptm) for section in paper.sections()]
    with (HERE / "reference" / "papers_without_comparison.csv").open() as file:
        reasons = f"## Without a comparison\n\n{table(list(csv.DictReader(file)))}\n"
    text = "\n".join([INTRO, *(section.text() for section in sections), reasons])
    print(text)
    (RESULTS / "papers-cpu.md").write_text(text)


if __name__ == "__main__":
    main()
