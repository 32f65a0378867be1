"""Output of the benchmarks: print a table with the machine's name and write it to results/."""

from datetime import date
from pathlib import Path

import torch

from patrickstar._memory.machine_name import machine_name

RESULTS = Path(__file__).parent / "results"


def publish(name: str, device: str, intro: str, columns: list[str], rows: list[list[str]]) -> str:
    """Print a Markdown table, write it to results/NAME-DEVICE.md and return it."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    machine = f"{machine_name(torch.device(device))}; PyTorch {torch.__version__}; {date.today()}"
    text = f"{intro}\n\nMachine: {machine}.\n\n" + "\n".join(lines) + "\n"
    print(text, flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}-{torch.device(device).type}.md").write_text(f"# {name}\n\n{text}")
    return text
