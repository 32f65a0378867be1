"""The command ``patrickstar plan``: predict whether a model fits a machine, its speed, and what limits it."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from patrickstar._cli.console import print_text
from patrickstar._perf_model.adapters import adapters_of
from patrickstar._perf_model.tiling import NOT_TILED, Tiling
from patrickstar._plan.first_look import first_look
from patrickstar._plan.model_table import models_that_fit
from patrickstar._plan.planned_model import find_planned_model
from patrickstar._plan.planner import SearchOptions
from patrickstar._plan.search import Search
from patrickstar.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlanOptions(SearchOptions):
    """Options of ``patrickstar plan``, by their names on the command line."""

    model: str | None
    capacity_factor: float | None
    lora: int | None
    qlora: int | None
    tiled_loss: bool
    tiled_mlp: bool
    largest: bool
    least_tflops: float
    html: Path | None
    as_json: bool


RANK = 16
"""Rank of the adapters in the table of models, if none is given."""
OF_MODELS = {"nodes": 1, "tp": 1, "ep": 1, "capacity_factor": None, "html": None, **NOT_TILED._asdict()}
"""Options that a table of models has no use for, and their defaults."""


def plan(options: PlanOptions, console: Console) -> None:
    """Print the plan, or without a model the open models that fit.

    Raises:
        ConfigError: A name is unknown, a mesh is impossible, or an option is for one model.
        BudgetError: Nothing fits.
    """
    search = options.search()
    adapters, tiling = adapters_of(options.lora, options.qlora), Tiling(options.tiled_loss, options.tiled_mlp)
    if options.largest and adapters is not None:
        raise ConfigError(f"--{'qlora' if adapters.quantized else 'lora'} {adapters.rank} is for the plan of one model")
    if options.model is None and not options.largest:
        _print_table(options, search, console)
        return
    # A terminal shows what goes on, until the plan is there.
    errors = Console(stderr=True)
    with errors.status(options.model or "a GPT") as status:
        # Standard output is for the plan alone.
        search = replace(search, say=status.update, tell=partial(print_text, errors))
        if options.model is None or options.largest:
            model = search.largest(options.sequence, options.capacity_factor, options.least_tflops)
        else:
            if adapters is None and (known := first_look(options.model, options.sequence, search)) is not None:
                search.tell(known)
            model = find_planned_model(
                options.model, options.sequence, search.machine, options.capacity_factor, adapters, tiling
            )
        found = search.plan(model)
    if options.as_json:
        console.print_json(json.dumps(found.as_dict()))
    else:
        print_text(console, str(found))
    if options.html is not None:
        found.write_html(options.html)
        if not options.as_json:
            print_text(console, f"{options.html} shows this plan in a browser")


def _print_table(options: PlanOptions, search: Search, console: Console) -> None:
    """Print the open models that fit the machine."""
    given = [name for name, default in OF_MODELS.items() if getattr(options, name) != default]
    if options.precision == "fp32":
        given.append("precision")
    if given:
        option = f"--{given[0].replace('_', '-')} {getattr(options, given[0])}"
        raise ConfigError(f"{option} is for the plan of one model: add --model NAME")
    with Console(stderr=True).status("estimating the open models"):
        table = models_that_fit(search, options.sequence, options.lora or options.qlora or RANK)
    if options.as_json:
        console.print_json(json.dumps(table.as_dict()))
    else:
        print_text(console, str(table))
