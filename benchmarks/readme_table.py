"""Write the tables of README.md from the result files in benchmarks/results/. `make bench` runs it last."""

import re
from collections.abc import Iterator
from pathlib import Path

from report import RESULTS, read, table

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- {name}: written by benchmarks/readme_table.py -->\n", "<!-- end of {name} -->"

GIB, GB = 1 << 30, 10**9
TOKENS = 512
"""Tokens of one step in results/throughput-cpu.md."""
PLAIN_RESIDENT = "plain peak RSS"
"""Column of results/disk_training_plain-cpu.md: resident memory of the plain PyTorch loop."""
UPDATE_BYTES = 28
"""Bytes that one AdamW update must move per parameter: see results/adam-cpu.md."""
NONE = "—"
"""In place of what was not measured."""
COLUMNS = ["task", "plain PyTorch", "DeepSpeed", "FSDP2", "PatrickStar", "physical limit"]


def row(task: str, ours: str, limit: str, plain: str = NONE, deepspeed: str = NONE, fsdp2: str = NONE) -> list[str]:
    """Return a task, and what each library and the hardware need for it, in the order of `COLUMNS`."""
    return [task, plain, deepspeed, fsdp2, f"**{ours}**", limit]


def first(text: str) -> float:
    """Return the number that a cell begins with."""
    found = re.match(r"[\d.]+", text)
    assert found is not None, f"{text!r} does not begin with a number"
    return float(found[0])


def machine() -> str:
    """Return processor and cores of the machine, the same in all result files of the table.

    Newer files also name its instruction sets.
    """
    files = ["throughput", "disk_training_plain", "small_pc", "disk_training_large", "data_parallel_time", "overhead"]
    texts = [read(f"{name}-cpu")[0] for name in (*files, "adam", "checkpoints")]
    found = {re.search(r"^Machine: (.*? cores)", text, re.M) for text in texts}
    (name,) = {match[1] for match in found if match is not None}
    return name


def measured() -> Iterator[list[str]]:
    """Yield the rows of the table of measurements."""
    yield from one_process()
    yield from larger_than_memory()
    for found in read("data_parallel_time-cpu")[1]:
        yield row(
            f"40M GPT, {found['p']} processes on 2 cores: a step",
            f"{found['engine s']} s",
            "compute and gloo's transfers",
            fsdp2=f"{found['FSDP2 s']} s",
        )
    yield update()
    save = {found["metric"]: found for found in read("checkpoints-cpu")[1]}
    size_gib = first(save["checkpoint size"]["measured"])
    ours, limit = (size_gib * GIB / (first(save["save rate"][side]) * GB) for side in ("measured", "limit"))
    yield row(f"124M GPT-2: save a checkpoint of {size_gib} GiB", f"{ours:.2f} s", f"{limit:.2f} s, bare writes")
    yield on_a_gpu()


def one_process() -> Iterator[list[str]]:
    """Yield the rows of steps in which everything fits."""
    for found in read("throughput-cpu")[1]:
        plain, ours = (TOKENS / float(found[f"{side} tokens/s"]) for side in ("plain", "engine"))
        checkpointing = ", activation checkpointing" if found["checkpointing"] == "on" else ""
        task = f"124M GPT-2, everything fits{checkpointing}: a step"
        yield row(task, f"{ours:.2f} s", "PyTorch's step, with a shorter update", plain=f"{plain:.2f} s")
    cost = {found[""]: f"{float(found['step ms']) / 1e3:.3f} s" for found in read("overhead-cpu")[1]}
    yield row(
        "147 parameters of width 32, everything fits: processor time of a step",
        cost["engine, resident"],
        "PyTorch's step",
        plain=cost["plain PyTorch"],
        fsdp2=cost["FSDP2"],
    )


def larger_than_memory() -> Iterator[list[str]]:
    """Yield the rows of models that exceed budgets."""
    disk = read("disk_training_plain-cpu")[1][1]
    resident, limit = disk["peak RSS"].split(" of ")
    yield row(
        "124M GPT-2, states on disk, gradients clipped: a step",
        f"{disk['our step']}, {resident}",
        f"{first(disk['limit']) * first(disk['plain step']):.2f} s, {limit}",
        plain=f"{disk['plain step']}, {disk[PLAIN_RESIDENT]}",
    )
    text, rows = read("small_pc-cpu")
    plain = re.search(r"Plain PyTorch needed ([\d.]+ GiB)", text)
    assert plain is not None
    for least, how in zip(rows[1:], ("", ", updated in backward"), strict=True):
        used, limit = least["peak RSS of limit"].split(" of ")
        budget_mib = first(least["device budget"].split(": ")[1])
        task = f"0.7B GPT, device budget {budget_mib:.0f} MiB{how}: peak memory"
        yield row(task, used, f"{limit}: {least['bytes']} bytes per parameter, activations", plain=plain[1])
    large = read("disk_training_large-cpu")[1][0]
    resident, limit = large["peak RSS of limit"].split(" of ")
    step = large["steps"].split(" / ")[1]
    task = f"2.0B GPT, {large['model data']} of model data, 24 GB machine: a step"
    yield row(task, f"{step}, {resident}", f"the disk's rate, {limit}", plain="does not fit")


def on_a_gpu() -> list[str]:
    """Return the row of the run on a GPU."""
    text = (RESULTS / "gpu-steps-cuda.md").read_text()
    steps = dict(re.findall(r"^\| 3b-4x2048, (\w+) \|.*?([\d.]+) s per step", text, re.M))
    limit = re.search(r"^\| limit \| ([\d.]+)", (RESULTS / "third-gpu-run.md").read_text(), re.M)
    assert limit is not None
    return row(
        "Llama 3B on an H200, 24 GiB of it, clipped, 8,192 tokens: a step",
        f"{float(steps['engine']):.2f} s",
        f"{limit[1]} s: backward, then the update at the host's rate",
        plain=f"{float(steps['plain']):.2f} s, 66 GiB",
        fsdp2=f"{float(steps['fsdp2']):.2f} s, 19 GiB",
        deepspeed=f"{float(steps['deepspeed']):.2f} s, 28 GiB",
    )


def update() -> list[str]:
    """Return the row of the optimizer step."""
    adam = read("adam-cpu")[1][-1]
    numel = first(adam["parameters"]) * 1e6
    ours = numel * UPDATE_BYTES / (first(adam["update GB/s"]) * 1e9)
    copying = max(first(adam["copy_ GB/s"]), first(adam["memmove GB/s"]))
    return row(
        f"AdamW update of {adam['parameters']} parameters on the CPU",
        f"{ours:.3f} s",
        f"{UPDATE_BYTES} bytes per parameter: {adam['update GB/s']} GB/s, a copy reaches {copying}",
        plain=f"{ours * first(adam['torch fused / ours']):.3f} s",
        deepspeed=f"{ours * first(adam['DeepSpeed / ours']):.3f} s",
    )


def planned() -> list[list[str]]:
    """Return the rows of the table of the largest models, from results/largest_model.md."""
    rows: dict[str, list[str]] = {}
    for row in read("largest_model")[1]:
        computer = f"{row['card']}; {row['host memory']} of RAM"
        rows.setdefault(computer, [computer, row["plain PyTorch"]])
        limit = row["limit, s"].partition(":")[0]
        speed = f": {row['tokens/s']} tokens/s, {row['s per step']} s per step (limit {limit} s)" if limit else ""
        lasts = f"; the drive lasts {row['the drive lasts']}" if row["the drive lasts"] else ""
        rows[computer].append(f"{row['PatrickStar']}{speed}{lasts}")
    return list(rows.values())


def tables() -> dict[str, str]:
    """Return the text between the markers of the README, by their names."""
    largest = ["card and RAM", "plain PyTorch", "PatrickStar", "PatrickStar with a 2 TB NVMe drive"]
    return {
        "largest": f"{table(planned(), largest)}\n",
        "measured": f"{table(list(measured()), COLUMNS)}\n\n"
        f"Measured on: {machine()}, no GPU, but for the last row. {NONE}: not measured.\n",
    }


def with_tables(readme: str) -> str:
    """Return the README with the tables of the current results."""
    for name, text in tables().items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        before, rest = readme.split(begin)
        readme = f"{before}{begin}{text}{end}{rest.split(end)[1]}"
    return readme


def main() -> None:
    """Write the tables into README.md and print them."""
    README.write_text(with_tables(README.read_text()))
    print("\n".join(tables().values()))


if __name__ == "__main__":
    main()
