"""Dry runs of training commands."""

import os
from collections.abc import Callable, Iterator

from rich.console import Console

import patrickstar as ps
from patrickstar._cli.console import print_row, print_text
from patrickstar._cli.train_options import TrainOptions
from patrickstar._cli.training_setup import training_config
from patrickstar._dry_run.precision_choice import PrecisionChoice, settle_precision
from patrickstar._dry_run.report import DryRunReport
from patrickstar._dry_run.simulation import simulate, simulate_on_this_machine
from patrickstar._models.model_source import find_model
from patrickstar._models.training_step import training_step
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar.errors import BudgetError, ConfigError
from patrickstar.integrations._meshes import MeshSizes


def dry_run_training(
    options: TrainOptions, console: Console, machine: str | None = None, processes: int = 1
) -> DryRunReport:
    """Print the predicted cost of a run, on this machine or one given by name or file. Nothing is trained.

    Args:
        machine: Name or file of a machine spec. Default: this machine.
        processes: Number of processes to simulate, of which the first one is reported.

    Raises:
        PatrickStarError: The run would fail; BudgetError if the model does not fit.
    """
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ConfigError(
            f"--dry-run simulates all processes in one: start it without torchrun, with --processes {started}"
        )
    sizes = MeshSizes(processes, options.tp, options.ep, options.replicas)
    if sizes.tp > 1 or sizes.ep > 1:
        raise ConfigError(
            "--dry-run can't simulate collectives inside of operators, so --tp and --ep have to be left out; "
            "`patrickstar plan --tp --ep` estimates them"
        )
    config = training_config(options)
    source = find_model(options.model, options.vocab_size)
    source.check_sequence(options.sequence)
    step = training_step(source.example(options.batch, options.sequence), options.accumulation, options.max_norm)
    build = source.to_meta()
    choices: list[PrecisionChoice] = []
    spec = None if machine is None or machine == "here" else find_machine(machine)
    if spec is None:
        config = settle_precision(config, build, config.find_device(), say=choices.append)
    elif config.precision == "auto":
        config = config.with_precision(spec.precision)
        choices.append(PrecisionChoice(spec.precision, f"the spec of {spec.name} describes its products in it"))

    def run(config: ps.Config) -> DryRunReport:
        if spec is None:
            device = config.find_device()
            return simulate_on_this_machine(ps.Engine, build, config, step, device, None, processes, options.replicas)
        return simulate(ps.Engine, build, config, step, spec, processes=processes, replicas=options.replicas)

    report = run(config)
    print_text(console, "\n".join(map(str, (*choices, report))))
    print_row(console, "compare", "`patrickstar plan` finds the fastest batch, and the least time of any placement")
    if config.update is None and processes == 1:
        for label, text in _late_steps(report, config, run):
            print_row(console, label, text)
    return report


def _late_steps(
    report: DryRunReport, config: ps.Config, run: Callable[[ps.Config], DryRunReport]
) -> Iterator[tuple[str, str]]:
    """Yield what late updates would change in the step of a dry run: a label and a text for each kind."""
    yield "delayed", f"{_late_step(report, config, ps.Delayed(), run)} (--delay-from, not exact)"
    if report.stats.disk_read_bytes:
        yield "lock-free", f"{_late_step(report, config, ps.LockFree(), run)} (--lock-free-from, not exact)"


def _late_step(
    report: DryRunReport, config: ps.Config, update: ps.Delayed | ps.LockFree, run: Callable[[ps.Config], DryRunReport]
) -> str:
    if not any(wait.channel != "host to device" for wait in report.waits):
        return "updates would gain nothing, since compute waits for none"
    try:
        late = run(config.model_copy(update={"update": update}))
    except BudgetError as error:
        return f"updates need more memory than there is: {error.short_bytes} bytes are missing"
    text = f"updates would make it a step of {late.seconds:.2f} s instead of {report.seconds:.2f} s"
    return f"{text}, {late.stats.staleness:.1f} steps behind" if late.stats.staleness else text
