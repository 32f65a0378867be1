"""The command ``patrickstar plan``: predict whether a model fits a machine, its speed, and what limits it."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from patrickstar._cli.console import print_text
from patrickstar._plan.first_look import first_look
from patrickstar._plan.planned_model import find_planned_model
from patrickstar._plan.planner import search_of


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``patrickstar plan``, by their names on the command line."""

    model: str
    machine: str | None
    gpu: str | None
    nodes: int
    gpus: int | None
    tp: int
    ep: int
    capacity_factor: float | None
    device_memory: str | None
    host_memory: str | None
    disk: str | None
    batch: int | None
    sequence: int
    activation_checkpointing: bool | None
    largest: bool
    least_tflops: float
    dry_run: bool
    html: Path | None
    as_json: bool


def plan(options: PlanOptions, console: Console) -> None:
    """Print the plan. Raise ConfigError for unknown names and impossible meshes, BudgetError if nothing fits."""
    search = search_of(
        machine=options.machine,
        gpu=options.gpu,
        gpus=options.gpus,
        nodes=options.nodes,
        tp=options.tp,
        ep=options.ep,
        device_memory=options.device_memory,
        host_memory=options.host_memory,
        disk=options.disk,
        batch=options.batch,
        activation_checkpointing=options.activation_checkpointing,
        dry_run=options.dry_run,
    )
    # A terminal shows what goes on, until the plan is there.
    errors = Console(stderr=True)
    with errors.status("a GPT" if options.largest else options.model) as status:
        # Standard output is for the plan alone.
        search = replace(search, say=status.update, tell=partial(print_text, errors))
        if not options.largest and (known := first_look(options.model, options.sequence, search)) is not None:
            search.tell(known)
        if options.largest:
            model = search.largest(options.sequence, options.capacity_factor, options.least_tflops)
        else:
            model = find_planned_model(options.model, options.sequence, search.machine, options.capacity_factor)
        found = search.plan(model)
    if options.as_json:
        console.print_json(json.dumps(found.as_dict()))
    else:
        print_text(console, str(found))
    if options.html is not None:
        found.write_html(options.html)
        if not options.as_json:
            print_text(console, f"{options.html} shows this plan in a browser")
