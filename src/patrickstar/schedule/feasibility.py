"""Does it fit? Asked before training, answered in bytes per tier."""

from collections.abc import Callable, Iterable

from patrickstar.errors import BudgetError
from patrickstar.layout.mapping import Layout
from patrickstar.layout.sizes import format_size
from patrickstar.schedule.placement import initial_placement


def working_set_bytes(layout: Layout, together: Iterable[set[str]]) -> int:
    """The most `param16` chunks that have to be on the device at once, for parameters that are read `together`."""
    nbytes = {chunk.index: chunk.compute_bytes for chunk in layout.chunks}
    sets = ({layout.places[name].chunk for name in names} for names in together)
    return max(sum(nbytes[index] for index in indices) for indices in sets)


def fits(layout: Layout, working_set: int, device_budget_bytes: int, host_budget_bytes: int) -> bool:
    """Whether model data has a place to begin in, and operators have room beside what can't leave the device."""
    placement = initial_placement(layout.chunks, device_budget_bytes, host_budget_bytes)
    if placement is None:
        return False
    stays = sum(chunk.optimizer_bytes for chunk in layout.chunks if placement[chunk.index].optimizer_on_device)
    return stays + working_set <= device_budget_bytes


def least(works: Callable[[int], bool], upper: int) -> int:
    """The smallest number up to `upper` that works, where all larger ones do too."""
    lower = 0
    while lower < upper:
        middle = (lower + upper) // 2
        if works(middle):
            upper = middle
        else:
            lower = middle + 1
    return upper


def check_budgets(
    layout: Layout, together: Iterable[set[str]], device_budget_bytes: int, host_budget_bytes: int
) -> None:
    """Raise BudgetError, with the smallest budgets that work, when the model data can't fit the two tiers.

    together: names of parameters that one operator reads at once. What activations take comes on top.
    """
    working_set = working_set_bytes(layout, together)
    if fits(layout, working_set, device_budget_bytes, host_budget_bytes):
        return
    total = layout.model_data_bytes
    plenty = 2 * total + working_set
    device = least(lambda nbytes: fits(layout, working_set, nbytes, host_budget_bytes), plenty)
    device_at_all = max(device_budget_bytes, least(lambda nbytes: fits(layout, working_set, nbytes, plenty), plenty))
    host = least(lambda nbytes: fits(layout, working_set, device_at_all, nbytes), plenty)
    raise BudgetError(
        f"the model data of {total} bytes ({format_size(total)}) does not fit a device budget of {device_budget_bytes} "
        f"bytes ({format_size(device_budget_bytes)}) and a host budget of {host_budget_bytes} bytes "
        f"({format_size(host_budget_bytes)}); the most demanding operator needs {working_set} bytes at once on the "
        f"device. The smallest budgets that work, activations and accumulated gradients not counted: "
        f"device_memory={device} bytes ({format_size(device)}) with this host_memory, or "
        f"device_memory={device_at_all} with host_memory={host} bytes ({format_size(host)})",
        device - device_budget_bytes,
    )
