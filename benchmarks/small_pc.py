"""Train gpt-0.7b with the memory of the paper's $700 PC (8 GiB device, 16 GiB host), then with the least that works.

The last one twice, the second time with updates in backward and split masters.

python benchmarks/small_pc.py [--device cpu] [--model gpt-0.7b]
Each run is a separate process, so that its resident memory can be measured. Three steps of 1 x 256 tokens; plain
PyTorch runs the same steps, and a digest of all losses and all bits of the final fp32 parameters is compared.
"""

import hashlib
import json
from functools import partial
from typing import Any

import torch
from fresh_processes import apart, resident_peak_bytes
from report import options, publish
from steps import gpt, tokens, train_step

import patrickstar as ps
from patrickstar._layout.byte_size import format_size, parse_size
from patrickstar.errors import BudgetError
from patrickstar.testing import ReferenceTrainer

PAPER, HOST, SLACK = parse_size("8GiB"), parse_size("16GiB"), parse_size("1GiB")
STEPS, TOKENS = 3, 256


def digest(losses: list[float], state: dict[str, torch.Tensor]) -> str:
    hasher = hashlib.blake2b(json.dumps([loss.hex() for loss in losses]).encode())
    for name in sorted(state):
        hasher.update(name.encode())
        hasher.update(state[name].cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def run(device: str, model: str, budget: int, in_backward: bool = False) -> dict[str, Any]:
    """Train in this process and return the measurements. `budget`: 0 for plain PyTorch."""
    torch.manual_seed(0)
    libraries = resident_peak_bytes()
    update = ps.InBackward() if in_backward else None
    config = ps.Config(device=device, device_memory=budget or None, host_memory=HOST, update=update)
    trainer = (ps.Engine if budget else ReferenceTrainer)(partial(gpt, model), config)
    ids = tokens(model, 1, TOKENS).to(trainer.device)
    try:
        losses = [train_step(trainer, ids).item() for _ in range(STEPS)]
    except BudgetError as error:
        return {"short": error.short_bytes}
    report = {"rss": resident_peak_bytes(), "libraries": libraries}
    if budget:
        layout, total, last = trainer.layout, trainer.stats.total, trainer.stats.last
        report |= {
            "numel": layout.numel,
            "bytes": layout.chunks[0].schema.bytes_per_param,
            "padding": layout.padding_bytes,
            "largest_chunk": max(chunk.compute_bytes for chunk in layout.chunks),
            "non_model": total.device_peak_non_model_bytes,
            "device_model": total.device_peak_model_bytes,
            "moved": last.h2d_bytes + last.d2h_bytes,
            "stall_s": last.stall_s,
        }
    return report | {"digest": digest(losses, trainer.state_dict())}


def row(name: str, budget: int, result: dict[str, Any], plain: dict[str, Any]) -> dict[str, str]:
    limit = result["bytes"] * result["numel"] + result["non_model"] + SLACK
    sizes = {
        "bytes x P": result["bytes"] * result["numel"],
        "padding": result["padding"],
        "activations": result["non_model"],
        "libraries": result["libraries"],
        "device model data": result["device_model"],
        "transferred per step": result["moved"],
    }
    return {
        "device budget": f"{name}: {format_size(budget)}",
        "peak RSS of limit": f"{format_size(result['rss'])} of {format_size(limit)}",
        "bytes": str(result["bytes"]),
        **{column: format_size(nbytes) for column, nbytes in sizes.items()},
        "stall per step": f"{result['stall_s']:.1f} s",
        "bit-identical to plain PyTorch": "yes" if result["digest"] == plain["digest"] else "NO",
    }


def main() -> None:
    given = options(__doc__, device="cpu", model="gpt-0.7b")
    in_a_process = partial(apart, run, given.device, given.model)
    plain, paper = in_a_process(0), in_a_process(PAPER)
    min_budget = paper["largest_chunk"] + paper["non_model"]
    # Measured memory varies between runs: raise the budget by what the error asks for, as a user would.
    while "short" in (tight := in_a_process(min_budget)):
        min_budget += tight["short"]
    split = in_a_process(min_budget, True)
    publish(
        "small_pc",
        f"{given.model}, {paper['numel']:,} parameters, bf16, {STEPS} steps of 1 x {TOKENS} tokens, host budget "
        f"{format_size(HOST)}. Limit of resident memory: bytes x parameters + activations (the measured non-model "
        f"data) + 1 GiB. The minimum device budget is the largest chunk ({format_size(paper['largest_chunk'])}) plus "
        f"the activations measured in the first run, raised by the missing bytes that an error reports. Plain PyTorch "
        f"needed {format_size(plain['rss'])}. The last row is with update=ps.InBackward(): its peak is "
        f"{split['rss'] / tight['rss']:.2f} of the one above.",
        [
            row("paper", PAPER, paper, plain),
            row("minimum", min_budget, tight, plain),
            row("minimum, updated in backward", min_budget, split, plain),
        ],
        device=given.device,
    )
    assert paper["digest"] == plain["digest"] == tight["digest"] == split["digest"], "results differ"


if __name__ == "__main__":
    main()
