"""Writes the table of README.md from benchmarks/results/. Run it after the benchmarks: `make bench` does."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
START, END = "<!-- table: written by benchmarks/readme_table.py -->\n", "<!-- end of table -->"

UPDATE_LIMIT = 46 / 28
"""Bytes per parameter of casting up, an fp32 step and casting down, over those of one pass: see results/adam-cpu.md."""

PLAIN_RSS = "plain's resident"
"""The column of what the plain loop takes."""


def read(name: str) -> tuple[str, list[dict[str, str]]]:
    """The machine and the rows of a result."""
    text = (ROOT / "benchmarks/results" / f"{name}-cpu.md").read_text()
    machine = re.search(r"^Machine: (.*?);", text, re.M)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert machine is not None and len(lines) > 2, f"{name} holds no table"
    return machine[1], [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def main() -> None:
    machine, throughput = read("throughput")
    _, small = read("small_pc")
    rows = [["what", "measured", "limit", "bits of plain PyTorch"], ["---"] * 4]
    for row in throughput:
        what = f"124M, everything fits, checkpointing {row['checkpointing']}: speed against the plain loop"
        rows.append([what, row["ratio (median of pairs)"], "1, the update aside", "yes"])
    for row in small:
        what = f"0.7B, device budget {row['device budget'].split(': ')[1]}: peak resident memory"
        measured, limit = row["peak RSS of limit"].split(" of ")
        rows.append([what, measured, limit, row["bits of plain PyTorch"]])
    for row in read("disk_training_plain")[1]:
        what = f"124M trained from disk within 2.00 GiB, {row['']}: step against the plain loop's in {row[PLAIN_RSS]}"
        rows.append([what, row["ratio (range)"].split(" (")[0], row["limit"], "as the reference's, in tests"])
    for row in read("data_parallel_time")[1]:
        what = f"40M, {row['p']} processes over gloo, everything fits: speed against FSDP2"
        rows.append([what, row["ratio (median of pairs)"], "1, wire and update aside", "yes, averaged in rank order"])
    saved = {row["what"]: row for row in read("checkpoints")[1]}
    for name, limit in (("saving, of a bare loop's rate", ">= 0.8"), ("step beside a save, of one without", "<= 1.15")):
        rows.append([f"124M, checkpoint of 1.39 GiB: {name}", saved[name]["measured"], limit, "yes, after a resume"])
    trainer = read("trainer")[1][-1]
    what = "40M: transformers' Trainer, a step of the loop's"
    rows.append([what, trainer["ratio (median of pairs)"], "<= 1.03", "yes, in fp32; see docs/trainer.md"])
    largest = read("adam")[1][-1]
    size = f"{largest['parameters']} parameters, {largest['threads']} threads"
    what = f"{size}: update against PyTorch's fused AdamW and casts"
    rows.append([what, largest["torch fused / ours"], f"{UPDATE_LIMIT:.2f}", "yes, without FMA"])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("| --- |", "|---|").replace(" --- |", "---|")
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(START)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{START}{table}\n\nMeasured on: {machine}.\n{END}{after}")
    print(table)


if __name__ == "__main__":
    main()
