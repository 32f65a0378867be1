"""Dry runs, with `Engine` bound as the engine that they train."""

from functools import partial

from patrickstar._dry_run.simulation import simulate, simulate_on_this_machine
from patrickstar._dry_run.traced_workload import traced_workloads
from patrickstar._engine.engine import Engine

dry_run = partial(simulate, Engine)
dry_run_here = partial(simulate_on_this_machine, Engine)
dry_run_workloads = partial(traced_workloads, Engine)
