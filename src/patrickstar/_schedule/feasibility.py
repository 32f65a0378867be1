"""Check before training that the model fits the budgets of the tiers."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace

from patrickstar._layout.byte_size import format_size
from patrickstar._layout.chunk_mapping import Layout
from patrickstar._schedule.fragmentation import NO_FRAGMENTATION, Fragmentation
from patrickstar._schedule.placement import Budgets, ChunkTiers, Tier, disk_bytes, initial_placement, least_shard_bytes
from patrickstar.errors import BudgetError


def working_set_bytes(layout: Layout, operators: Iterable[set[str]]) -> int:
    """Return the most `param16` bytes that one operator needs on the device. `operators`: parameter names of each."""
    nbytes = {chunk.index: chunk.compute_bytes for chunk in layout.chunks}
    sets = ({layout.locations[name].chunk for name in names} for names in operators)
    return max(sum(nbytes[index] for index in indices) for indices in sets)


def fits(layout: Layout, working_set: int, budgets: Budgets) -> bool:
    """Return True if an initial placement exists that leaves room for the working set on the device."""
    return initial_placement(layout.chunks, budgets, working_set) is not None


def smallest_accepted(accepts: Callable[[int], bool], upper: int) -> int:
    """Return the smallest number up to `upper` that `accepts` accepts, if it accepts all larger ones."""
    return bisect_left(range(upper), True, key=accepts)


def check_budgets(
    layout: Layout,
    operators: Iterable[set[str]],
    budgets: Budgets,
    staging_bytes: int = 0,
    library_bytes: int = 0,
    update_bytes: int = 0,
    *,
    with_disk: bool = False,
    device_memory: int | None = None,
    fragmentation: Fragmentation = NO_FRAGMENTATION,
) -> None:
    """Raise BudgetError with the smallest sufficient budgets if the model data does not fit the tiers.

    `operators` holds the parameter names that each operator reads. `budgets` excludes `staging_bytes` (host, for
    transfers), the buffers of late updates (host), `library_bytes` (device, for cuBLAS) and what is left to
    `fragmentation` of `device_memory`, the budget of the device; the error includes them. `update_bytes` is what the
    update of a whole parameter needs on the device. Activations are not counted.
    """
    of_operators = working_set_bytes(layout, operators)
    working_set = max(of_operators, update_bytes)

    def accepts(**changed: int) -> bool:
        return fits(layout, working_set, replace(budgets, **changed))

    if budgets.host >= 0 and accepts():
        return
    total = layout.model_data_bytes
    given_device = budgets.device + library_bytes if device_memory is None else device_memory
    unplanned = given_device - budgets.device - library_bytes

    def device_budget(planned: int) -> int:
        return fragmentation.budget_bytes(planned + library_bytes)

    reserved = staging_bytes + layout.buffer_bytes
    given_host = budgets.host + reserved
    given = (
        f"the model data of {total} bytes ({format_size(total)}) does not fit a device budget of {given_device} "
        f"bytes ({format_size(given_device)}) and a host budget of {given_host} bytes ({format_size(given_host)})"
    )
    needs = f"the most demanding operator needs {of_operators} bytes at once on the device"
    if update_bytes > of_operators:
        needs += (
            f", and the optimizer, which updates whole parameters, {update_bytes} bytes ({format_size(update_bytes)})"
        )
    if library_bytes:
        needs += (
            f", and this device needs {library_bytes} bytes ({format_size(library_bytes)}) more for its libraries "
            f"(cuBLAS workspaces)"
        )
    if unplanned:
        needs += f", and {unplanned} bytes ({format_size(unplanned)}) of its budget are left to fragmentation"
    if layout.buffer_bytes:
        needs += f", and late updates need {layout.buffer_bytes} bytes ({format_size(layout.buffer_bytes)}) on the host"
    if with_disk:
        all_on_disk = {chunk.index: ChunkTiers(Tier.DEVICE, Tier.DISK) for chunk in layout.chunks}
        disk = disk_bytes(layout.chunks, all_on_disk)
        shards = least_shard_bytes(layout.chunks)
        min_host = reserved + shards
        purpose = " and buffers of late updates" if layout.buffer_bytes else ""
        purpose += " and shards of the parameters" if shards else ""
        min_device = device_budget(working_set)
        shortage = {
            f"device_memory={min_device} bytes ({format_size(min_device)})": min_device - given_device,
            f"host_memory={min_host} bytes ({format_size(min_host)}), for staging buffers{purpose}": (
                shards - budgets.host
            ),
            f"a disk with {disk} bytes ({format_size(disk)}) free and at least this capacity": disk - budgets.disk,
        }
        raise BudgetError(
            f"{given} with a disk of {budgets.disk} bytes ({format_size(budgets.disk)}); {needs}",
            max(shortage.values()),
            "Required, activations and accumulated gradients not counted: "
            + "; ".join(option for option, nbytes in shortage.items() if nbytes > 0),
        )
    ample = 2 * total + working_set
    device = smallest_accepted(lambda nbytes: accepts(device=nbytes), ample)
    min_device = max(budgets.device, smallest_accepted(lambda nbytes: accepts(device=nbytes, host=ample), ample))
    host = smallest_accepted(lambda nbytes: accepts(device=min_device, host=nbytes), ample)
    device, min_device, host = device_budget(device), device_budget(min_device), host + reserved
    # By default chunks are larger with a larger device budget, and so is what an operator needs at once.
    chunk_bytes = layout.chunk_numel * max(chunk.schema.compute.itemsize for chunk in layout.chunks)
    raise BudgetError(
        f"{given}; {needs}",
        device - given_device,
        f"The smallest budgets that work with chunk_size={chunk_bytes}, activations and accumulated gradients not "
        f"counted: "
        f"device_memory={device} bytes ({format_size(device)}) with this host_memory of {given_host} bytes, or "
        f"device_memory={min_device} with host_memory={host} bytes ({format_size(host)}). With less, add a disk: "
        f"ps.Config(disk=ps.Disk(directory))",
    )


def check_together(layout: Layout, budgets: Budgets, gradient_bytes: int, staging_bytes: int, optimizer: str) -> None:
    """Raise BudgetError if the host can't hold what an update of all parameters together needs there at once.

    Args:
        budgets: Without `gradient_bytes` and `staging_bytes` of the host. Without a disk the host also holds the
            parameters that the device does not.
        gradient_bytes: Bytes of all gradients in the masters' dtype.
        staging_bytes: Host memory of buffers for transfers.
        optimizer: Name of the optimizer.
    """
    param16 = [chunk.evictable_bytes for chunk in layout.chunks]
    spilled = 0 if budgets.disk else min(sum(param16), max(0, sum(param16) - budgets.device) + 2 * max(param16))
    short = layout.optimizer_bytes + spilled - budgets.host
    if short <= 0:
        return
    together, given = layout.optimizer_bytes + gradient_bytes, budgets.host + gradient_bytes + staging_bytes
    others = {"parameters": spilled, "buffers": staging_bytes}
    beside = " and ".join(f"{nbytes} bytes of {name}" for name, nbytes in others.items() if nbytes)
    once = f"at once, beside {beside}" if beside else "at once"
    raise BudgetError(
        f"{optimizer} updates all parameters together, so masters, states and gradients of {together} bytes "
        f"({format_size(together)}) have to be on the host {once}, and its budget is {given} bytes "
        f"({format_size(given)})",
        short,
        f"Raise host_memory by at least {short} bytes ({format_size(short)}), or use an optimizer that updates "
        f"parameters one by one, such as ps.AdamW",
    )
