"""Compare the exact step, with and without updates beside backward, with delayed updates, by dry runs.

python benchmarks/delayed.py
Dry runs of the engine on a machine spec. Without any overlap a step takes the time of compute and of the update, one
after the other: the step that ZeRO-Offload's delayed update (§5.2) improves on.
"""

import torch
from report import publish

import patrickstar as ps
from patrickstar import Engine
from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulation import simulate
from patrickstar._models.model_source import find_model
from patrickstar._perf_model.machine_spec import find_machine

MACHINE = "8xV100-32GB"
CASES = [(model, batch) for model in ("gpt-1b", "gpt-4b", "gpt-8b", "gpt-10b") for batch in (1, 2, 4, 8, 16)]
"""Model, and sequences of 1024 tokens."""


def dry_run(name: str, batch: int, update: ps.Delayed | None, speculates: bool = True) -> DryRunReport:
    source, machine = find_model(name), find_machine(MACHINE).model_copy(update={"disk": None})
    model, _ = source.open(True)
    ids = torch.zeros(batch, 1024, dtype=torch.int64)

    def step(engine: ps.Engine) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.clip_grad_norm_(1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    return simulate(Engine, model, ps.Config(device="cpu", update=update), step, machine, speculates=speculates)


def row(name: str, batch: int) -> list[str]:
    exact, later = dry_run(name, batch, None), dry_run(name, batch, None, speculates=False)
    delayed = dry_run(name, batch, ps.Delayed())
    compute_s, update_s = delayed.compute_s, _update_s(delayed)
    one_by_one = exact.compute_s + _update_s(exact)
    return [
        name,
        f"{batch} x 1024",
        f"{exact.compute_s:.2f} s",
        f"{_update_s(exact):.2f} s",
        f"{one_by_one:.2f} s",
        f"{later.seconds:.2f} s",
        f"{exact.seconds:.2f} s",
        f"{delayed.seconds:.2f} s",
        f"{max(compute_s, update_s):.2f} s",
        f"{max(0.0, delayed.seconds - max(compute_s, update_s)):.2f} s",
        f"{one_by_one / delayed.seconds:.2f}",
        f"{exact.seconds / delayed.seconds:.2f}",
    ]


def _update_s(report: DryRunReport) -> float:
    return next(used.busy_s for used in report.channels if used.name == "update on the host")


def main() -> None:
    rows = []
    for case in CASES:
        rows.append(row(*case))
        print(rows[-1], flush=True)
    publish(
        "delayed",
        torch.device("cpu"),
        f"Dry runs on one GPU of {MACHINE}, activation checkpointing, gradients clipped: the step without any overlap "
        f"of compute and update (their sum), the exact step with updates beside the next forward alone, the exact step "
        f"as it is (also beside backward), and the step with delayed updates. Its bound is the longer one of compute "
        f"and update, and what is exposed is its time beyond that.",
        [
            "model",
            "batch",
            "compute",
            "update",
            "no overlap",
            "exact, beside forward",
            "exact",
            "delayed",
            "bound",
            "exposed",
            "no overlap / delayed",
            "exact / delayed",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
