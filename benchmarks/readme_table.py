"""Write the table of README.md from the result files in benchmarks/results/. `make bench` runs it last."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
START, END = "<!-- table: written by benchmarks/readme_table.py -->\n", "<!-- end of table -->"

TOKENS = 512
"""Tokens of one step in results/throughput-cpu.md."""
PLAIN_RESIDENT = "plain peak RSS"
"""Column of results/disk_training_plain-cpu.md: resident memory of the plain PyTorch loop."""
UPDATE_BYTES = 28
"""Bytes that one AdamW update must move per parameter: see results/adam-cpu.md."""


def read(name: str) -> tuple[str, list[dict[str, str]]]:
    """Return the machine's name and the rows of a result file.

    Args:
        name: The file's name without `-cpu.md`.

    Returns:
        The machine, and one dictionary per row, by column.
    """
    text = (ROOT / "benchmarks/results" / f"{name}-cpu.md").read_text()
    machine = re.search(r"^Machine: (.*?);", text, re.M)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert machine is not None and len(lines) > 2, f"{name} contains no table"
    return machine[1], [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def first(text: str) -> float:
    """Return the number that a cell begins with."""
    found = re.match(r"[\d.]+", text)
    assert found is not None, f"{text!r} does not begin with a number"
    return float(found[0])


def table() -> tuple[str, list[list[str]]]:
    """Return the machine's name and the rows: task, plain PyTorch or a peer, PatrickStar, physical limit."""
    machine, throughput = read("throughput")
    rows = []
    for row in throughput:
        plain, ours = (TOKENS / float(row[f"{side} tokens/s"]) for side in ("plain", "engine"))
        checkpointing = "with" if row["checkpointing"] == "on" else "without"
        task = f"124M GPT-2, everything fits, {checkpointing} activation checkpointing: one step"
        rows.append([task, f"{plain:.2f} s (PyTorch)", f"{ours:.2f} s", "PyTorch's time less part of the update"])
    disk = read("disk_training_plain")[1][1]
    rows.append(
        [
            "124M GPT-2, parameters and states on disk, gradients clipped: one step",
            f"{disk['plain step']} in {disk[PLAIN_RESIDENT]} (PyTorch)",
            f"{disk['our step']} in {disk['peak RSS'].split(' of ')[0]}",
            "PyTorch's step",
        ]
    )
    caption = (ROOT / "benchmarks/results/small_pc-cpu.md").read_text()
    plain_memory = re.search(r"Plain PyTorch needed ([\d.]+ GiB)", caption)
    assert plain_memory is not None
    small = read("small_pc")[1][-1]
    used, limit = small["peak RSS of limit"].split(" of ")
    budget = small["device budget"].split(": ")[1]
    task = f"0.7B GPT, device budget {budget}: peak memory of the process"
    rows.append([task, f"{plain_memory[1]} (PyTorch)", used, f"{limit} (14 bytes per parameter + activations)"])
    large = read("disk_training_large")[1][0]
    resident = large["peak RSS of limit"].split(" of ")[0]
    task = f"2.0B GPT, {large['model data']} of model data, 24 GB machine: one step"
    rows.append([task, "does not fit (PyTorch)", f"{large['steps'].split(' / ')[1]} in {resident}", "the disk's rate"])
    for row in read("data_parallel_time")[1]:
        task = f"40M GPT, {row['p']} processes on 2 cores: one step"
        rows.append([task, f"{row['FSDP2 s']} s (FSDP2)", f"{row['engine s']} s", "compute and gloo's transfers"])
    adam = read("adam")[1][-1]
    numel = first(adam["parameters"]) * 1e6
    ours = numel * UPDATE_BYTES / (first(adam["update GB/s"]) * 1e9)
    fused = ours * first(adam["torch fused / ours"])
    deepspeed = ours * first(adam["DeepSpeed / ours"])
    peers = f"{fused:.3f} s (PyTorch fused), {deepspeed:.3f} s (DeepSpeed)"
    copying = max(first(adam["copy_ GB/s"]), first(adam["memmove GB/s"]))
    bound = f"{UPDATE_BYTES} bytes per parameter; at {adam['update GB/s']} GB/s, where a copy reaches {copying}"
    task = f"AdamW update of {adam['parameters']} parameters on the CPU"
    rows.append([task, peers, f"{ours:.3f} s", bound])
    saved = {row["metric"]: row for row in read("checkpoints")[1]}["save rate"]
    bare = saved["limit"].split(",")[0]
    rows.append(["124M GPT-2, writing a checkpoint of 1.39 GiB", "", saved["measured"], f"{bare}, the disk's rate"])
    return machine, rows


def main() -> None:
    """Print the table and write it into README.md."""
    machine, rows = table()
    lines = [["task", "plain PyTorch or peer", "PatrickStar", "physical limit"], *rows]
    text = "\n".join(f"| {' | '.join(row)} |" for row in [lines[0], ["---"] * 4, *rows])
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(START)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{START}{text}\n\nMeasured on: {machine}, no GPU.\n{END}{after}")
    print(text)


if __name__ == "__main__":
    main()
