"""Compare the exact step, with and without updates beside backward, with delayed updates, by dry runs.

python benchmarks/delayed.py
Dry runs of the engine on a machine spec. Without any overlap a step takes the time of compute and of the update, one
after the other: the step that ZeRO-Offload's delayed update (§5.2) improves on.
"""

from itertools import product

from dry_runs import builder_of, dry_run, host_update_s, without_disk
from report import publish, shown

import patrickstar as ps
from patrickstar._dry_run.report import DryRunReport

MACHINE, SEQUENCE = "8xV100-32GB", 1024
MODELS, BATCHES = ("gpt-1b", "gpt-4b", "gpt-8b", "gpt-10b"), (1, 2, 4, 8, 16)


def row(name: str, batch: int) -> dict[str, str]:
    def simulated(**more: object) -> DryRunReport:
        return dry_run(builder_of(name), without_disk(MACHINE), batch, SEQUENCE, **more)

    exact, later, delayed = simulated(), simulated(speculates=False), simulated(update=ps.Delayed())
    bound_s = max(delayed.compute_s, host_update_s(delayed))
    one_by_one_s = exact.compute_s + host_update_s(exact)
    seconds = {
        "compute": exact.compute_s,
        "update": host_update_s(exact),
        "no overlap": one_by_one_s,
        "exact, beside forward": later.seconds,
        "exact": exact.seconds,
        "delayed": delayed.seconds,
        "bound": bound_s,
        "exposed": max(0.0, delayed.seconds - bound_s),
    }
    return {
        "model": name,
        "batch": f"{batch} x {SEQUENCE}",
        **{column: f"{value:.2f} s" for column, value in seconds.items()},
        "no overlap / delayed": f"{one_by_one_s / delayed.seconds:.2f}",
        "exact / delayed": f"{exact.seconds / delayed.seconds:.2f}",
    }


def main() -> None:
    publish(
        "delayed",
        f"Dry runs on one GPU of {MACHINE}, activation checkpointing, gradients clipped: the step without any overlap "
        f"of compute and update (their sum), the exact step with updates beside the next forward alone, the exact step "
        f"as it is (also beside backward), and the step with delayed updates. Its bound is the longer one of compute "
        f"and update, and what is exposed is its time beyond that.",
        shown(row(name, batch) for name, batch in product(MODELS, BATCHES)),
    )


if __name__ == "__main__":
    main()
