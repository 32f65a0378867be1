"""Options of ``patrickstar train`` for delayed and lock-free updates, and what a dry run says of them."""

from collections.abc import Callable, Iterator

import patrickstar as ps
from patrickstar._cli.train_options import TrainOptions
from patrickstar._dry_run.report import DryRunReport
from patrickstar._step.update_log import LoggedRun
from patrickstar.errors import BudgetError, ConfigError

Update = ps.Delayed | ps.LockFree


def late_update(options: TrainOptions) -> Update | None:
    """Return when updates take effect. Raises ConfigError for options that exclude each other."""
    chosen = {
        "--delay-from": options.delay_from,
        "--lock-free-from": options.lock_free_from,
        "--replay": options.replay,
    }
    given = [name for name, value in chosen.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other: leave one out")
    if options.update_log is not None and given != ["--lock-free-from"]:
        raise ConfigError(f"--update-log {options.update_log} requires --lock-free-from, whose updates it records")
    if options.delay_from is not None:
        return ps.Delayed(after=options.delay_from)
    if options.replay is not None:
        log = LoggedRun(options.replay)
        last_step = max(log.last_step, log.options["after"] - 1)  # steps before need no log
        if options.steps > last_step:
            raise ConfigError(
                f"--replay {options.replay} ends with step {last_step}: use --steps {last_step} or less instead of "
                f"{options.steps}"
            )
        return ps.LockFree(replay=options.replay, **log.options)
    if options.lock_free_from is not None:
        return ps.LockFree(after=options.lock_free_from, max_staleness=options.max_staleness, log=options.update_log)
    return None


def late_steps(
    report: DryRunReport, config: ps.Config, run: Callable[[ps.Config], DryRunReport]
) -> Iterator[tuple[str, str]]:
    """Yield what late updates would change in the step of a dry run: a label and a text for each kind."""
    yield "delayed", f"{_late_step(report, config, ps.Delayed(), run)} (--delay-from, not exact)"
    if report.stats.disk_read_bytes:
        yield "lock-free", f"{_late_step(report, config, ps.LockFree(), run)} (--lock-free-from, not exact)"


def _late_step(
    report: DryRunReport, config: ps.Config, update: Update, run: Callable[[ps.Config], DryRunReport]
) -> str:
    if not any(wait.channel != "host to device" for wait in report.waits):
        return "updates would gain nothing, since compute waits for none"
    try:
        late = run(config.model_copy(update={"update": update}))
    except BudgetError as error:
        return f"updates need more memory than there is: {error.short_bytes} bytes are missing"
    text = f"updates would make it a step of {late.seconds:.2f} s instead of {report.seconds:.2f} s"
    return f"{text}, {late.stats.staleness:.1f} steps behind" if late.stats.staleness else text
