"""Write the table of README.md from benchmarks/results/; `make bench` runs it after the benchmarks."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
START, END = "<!-- table: written by benchmarks/readme_table.py -->\n", "<!-- end of table -->"

UPDATE_LIMIT = 46 / 28
"""Bytes per parameter of upcast, fp32 step and downcast, divided by those of one pass: see results/adam-cpu.md."""

PLAIN_RSS = "plain peak RSS"
"""Column with the resident memory of the plain loop."""


def read(name: str) -> tuple[str, list[dict[str, str]]]:
    """Return the machine and the rows of a result."""
    text = (ROOT / "benchmarks/results" / f"{name}-cpu.md").read_text()
    machine = re.search(r"^Machine: (.*?);", text, re.M)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert machine is not None and len(lines) > 2, f"{name} contains no table"
    return machine[1], [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def main() -> None:
    machine, throughput = read("throughput")
    _, small = read("small_pc")
    rows = [["benchmark", "measured", "limit", "bit-identical to plain PyTorch"], ["---"] * 4]
    for row in throughput:
        label = f"124M, everything fits, checkpointing {row['checkpointing']}: speed relative to a plain PyTorch loop"
        rows.append([label, row["ratio (median of pairs)"], "1, without the update", "yes"])
    for row in small:
        label = f"0.7B, device budget {row['device budget'].split(': ')[1]}: peak resident memory"
        measured, limit = row["peak RSS of limit"].split(" of ")
        rows.append([label, measured, limit, row["bit-identical to plain PyTorch"]])
    for row in read("disk_training_plain")[1]:
        label = (
            f"124M trained from disk within 2.00 GiB, {row['']}: step time relative to a plain PyTorch loop in "
            f"{row[PLAIN_RSS]}"
        )
        rows.append([label, row["ratio (range)"].split(" (")[0], row["limit"], "as the reference, in tests"])
    for row in read("data_parallel_time")[1]:
        label = f"40M, {row['p']} processes over gloo, everything fits: speed relative to FSDP2"
        rows.append([label, row["ratio (median of pairs)"], "1, without wire and update", "yes, rank-order average"])
    saved = {row["metric"]: row for row in read("checkpoints")[1]}
    for name, limit in (("save rate / bare write loop", ">= 0.8"), ("step during a save / step without", "<= 1.15")):
        rows.append([f"124M, checkpoint of 1.39 GiB: {name}", saved[name]["measured"], limit, "yes, after a resume"])
    trainer = read("trainer")[1][-1]
    label = "40M: step time of transformers' Trainer relative to the engine's own loop"
    rows.append([label, trainer["ratio (median of pairs)"], "<= 1.03", "yes, in fp32; see docs/trainer.md"])
    largest = read("adam")[1][-1]
    size = f"{largest['parameters']} parameters, {largest['threads']} threads"
    label = f"{size}: update speed relative to PyTorch's fused AdamW with casts"
    rows.append([label, largest["torch fused / ours"], f"{UPDATE_LIMIT:.2f}", "yes, without FMA"])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("| --- |", "|---|").replace(" --- |", "---|")
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(START)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{START}{table}\n\nMeasured on: {machine}.\n{END}{after}")
    print(table)


if __name__ == "__main__":
    main()
