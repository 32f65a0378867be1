"""Does it fit? Asked before training, answered in bytes per tier."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from patrickstar._layout.byte_size import format_size
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._schedule.placement import Budgets, ChunkTiers, Tier, disk_bytes, initial_placement
from patrickstar.errors import BudgetError


def working_set_bytes(layout: Layout, together: Iterable[set[str]]) -> int:
    """The most `param16` chunks that have to be on the device at once, for parameters that are read `together`."""
    nbytes = {chunk.index: chunk.compute_bytes for chunk in layout.chunks}
    sets = ({layout.locations[name].chunk for name in names} for names in together)
    return max(sum(nbytes[index] for index in indices) for indices in sets)


def fits(layout: Layout, working_set: int, budgets: Budgets) -> bool:
    """Whether model data has a place to begin in, and operators have room beside what can't leave the device."""
    return initial_placement(layout.chunks, budgets, working_set) is not None


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
    layout: Layout, together: Iterable[set[str]], budgets: Budgets, staging_bytes: int = 0, library_bytes: int = 0
) -> None:
    """Raise BudgetError, with the smallest budgets that work, when the model data can't fit the tiers.

    together: names of parameters that one operator reads at once. staging_bytes: what pages on their way to the disk
    take of the host. library_bytes: what the device's libraries keep of it. `budgets` are without both; the error
    counts them. What activations take comes on top.
    """
    working_set = working_set_bytes(layout, together)

    def works(**changed: int) -> bool:
        return fits(layout, working_set, replace(budgets, **changed))

    if budgets.host >= 0 and works():
        return
    total, given_device = layout.model_data_bytes, budgets.device + library_bytes
    given = (
        f"the model data of {total} bytes ({format_size(total)}) does not fit a device budget of {given_device} "
        f"bytes ({format_size(given_device)}) and a host budget of {budgets.host + staging_bytes} bytes "
        f"({format_size(budgets.host + staging_bytes)})"
    )
    needs = f"the most demanding operator needs {working_set} bytes at once on the device"
    if library_bytes:
        needs += (
            f", and this device needs {library_bytes} bytes ({format_size(library_bytes)}) more for its libraries "
            f"(cuBLAS workspaces)"
        )
    if staging_bytes:
        plain = {chunk.index: ChunkTiers(Tier.DEVICE, Tier.DISK) for chunk in layout.chunks}
        disk = disk_bytes(layout.chunks, plain)
        shards = sum(chunk.shard_bytes for chunk in layout.chunks)
        least_host = staging_bytes + shards
        parts = " and this process's part of what operators read" if shards else ""
        least_device = working_set + library_bytes
        short = {
            f"device_memory={least_device} bytes ({format_size(least_device)})": working_set - budgets.device,
            f"host_memory={least_host} bytes ({format_size(least_host)}), for pages on their way{parts}": (
                shards - budgets.host
            ),
            f"a disk with {disk} bytes ({format_size(disk)}) free, and a capacity of as many": disk - budgets.disk,
        }
        raise BudgetError(
            f"{given} with a disk of {budgets.disk} bytes ({format_size(budgets.disk)}); {needs}. What works, "
            f"activations and accumulated gradients not counted: "
            f"{'; '.join(what for what, nbytes in short.items() if nbytes > 0)}",
            max(short.values()),
        )
    plenty = 2 * total + working_set
    device = least(lambda nbytes: works(device=nbytes), plenty)
    at_all = max(budgets.device, least(lambda nbytes: works(device=nbytes, host=plenty), plenty))
    host = least(lambda nbytes: works(device=at_all, host=nbytes), plenty)
    device, device_at_all = device + library_bytes, at_all + library_bytes
    raise BudgetError(
        f"{given}; {needs}. The smallest budgets that work, activations and accumulated gradients not counted: "
        f"device_memory={device} bytes ({format_size(device)}) with this host_memory, or "
        f"device_memory={device_at_all} with host_memory={host} bytes ({format_size(host)}). With less, give a disk: "
        f"ps.Config(disk=ps.Disk(directory))",
        device - given_device,
    )
