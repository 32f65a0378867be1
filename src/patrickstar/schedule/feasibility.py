"""Does it fit? Asked before training, answered in bytes per tier."""

from dataclasses import dataclass

from patrickstar.errors import BudgetError
from patrickstar.layout.mapping import Layout
from patrickstar.layout.sizes import format_size


@dataclass(frozen=True)
class Needs:
    """The least bytes that model data asks of the tiers; non-model data comes on top of `device_bytes`."""

    device_bytes: int
    total_bytes: int
    swap_bytes: int


def least_bytes(layout: Layout) -> Needs:
    """What any run of this layout needs: the largest `param16` chunk on the device, everything somewhere.

    When parameters don't all fit on the device, exchanging two chunks needs room for one more beside all of them.
    """
    largest = max(chunk.compute_bytes for chunk in layout.chunks)
    return Needs(device_bytes=largest, total_bytes=layout.model_data_bytes, swap_bytes=largest)


def check_budgets(layout: Layout, device_budget_bytes: int, host_budget_bytes: int) -> None:
    """Raise BudgetError, with the smallest budgets that work, when the model data can't fit the two tiers."""
    needs = least_bytes(layout)
    smallest_host = max(0, needs.total_bytes - device_budget_bytes)
    if layout.param16_bytes > device_budget_bytes:
        smallest_host = max(smallest_host, needs.total_bytes - device_budget_bytes + needs.swap_bytes)
    problems = []
    if device_budget_bytes < needs.device_bytes:
        problems.append(
            f"the device budget of {device_budget_bytes} bytes ({format_size(device_budget_bytes)}) is smaller than "
            f"the largest chunk"
        )
        smallest_host = needs.total_bytes
    if host_budget_bytes < smallest_host:
        problems.append(
            f"the host budget of {host_budget_bytes} bytes ({format_size(host_budget_bytes)}) can't take what the "
            f"device budget leaves over"
        )
    if problems:
        raise BudgetError(
            f"the model data of {needs.total_bytes} bytes ({format_size(needs.total_bytes)}) does not fit: "
            f"{'; '.join(problems)}. The smallest budgets that work: device_memory={needs.device_bytes} bytes plus "
            f"what activations take, and with device_memory={max(device_budget_bytes, needs.device_bytes)} "
            f"host_memory={smallest_host} bytes ({format_size(smallest_host)})"
        )


def check_shared_memory(layout: Layout, installed_bytes: int) -> None:
    """Raise BudgetError when both tiers are parts of one RAM, and that is smaller than the model data."""
    if layout.model_data_bytes > installed_bytes:
        raise BudgetError(
            f"the model data of {layout.model_data_bytes} bytes ({format_size(layout.model_data_bytes)}) does not fit "
            f"into the {installed_bytes} bytes ({format_size(installed_bytes)}) of memory that this machine has left, "
            f"whatever the budgets; use a smaller model",
            layout.model_data_bytes - installed_bytes,
        )
