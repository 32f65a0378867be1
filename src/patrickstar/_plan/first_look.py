"""First look at an open model, before a trace, which takes seconds: its size, and the least time of a step."""

from dataclasses import replace

from patrickstar._layout.byte_size import format_size
from patrickstar._models.open_models import find_open_model
from patrickstar._perf_model.perf_model import estimate
from patrickstar._perf_model.text_tables import format_seconds
from patrickstar._perf_model.workload import Workload
from patrickstar._plan.search import Search

OPERATIONS = 6
"""Least operations per token and parameter that is multiplied: two in forward, four in backward."""
LARGE = 1 << 20
"""Size of products that run at the full rate, as all do in a lower bound."""


def first_look(name: str, sequence: int, search: Search) -> str | None:
    """Return the size of an open model and the least time of a step; None for other models.

    Activations and layers in use, which a trace finds, are left out.

    Raises:
        BudgetError: The model data alone do not fit.
    """
    model = find_open_model(name)
    if model is None or search.mesh.lockstep or search.mesh.nodes > 1:
        return None
    batch = min(search.batches)
    # Rows of the embedding are looked up, not multiplied; of experts only some compute.
    multiplied = 0 if "num_local_experts" in model.options else model.params - model.vocab * model.hidden
    work = Workload(
        params=model.params,
        batch=batch,
        tokens=batch * sequence,
        checkpointing=False,
        operations=OPERATIONS * multiplied * batch * sequence,
        matrix_size=LARGE,
        non_model_bytes=0,
        working_bytes=0,
    )
    mesh = replace(search.mesh, replica_nodes=1)
    found = estimate(work, search.budgets(search.machine, mesh), mesh)
    return (
        f"{name}: {model.params / 1e9:.2f} billion parameters have {format_size(found.model_data_bytes)} of model data"
        f"{' per process' if mesh.processes > 1 else ''}, which fit without activations; {batch} x {sequence:,} tokens "
        f"take at least {format_seconds(found.bound_s)}, because of {found.busiest.name}. The fastest batch is sought"
    )
