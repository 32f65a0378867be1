"""The calls by which torch.distributed.checkpoint has planners, writers and readers of all processes play together."""

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._checkpoint.storage_writer import CheckpointWriter
from patrickstar.errors import CheckpointError, PatrickStarError

# With one process dcp.save and dcp.load warn that there is just one, so it is asked for the same here, without them.


def save(writer: CheckpointWriter, planner: SavePlanner, group: dist.ProcessGroup | None) -> None:
    """Write what all processes of the group have, or this one. Raises CheckpointError if one can't."""
    try:
        if group is not None:
            state_dict_saver.save({}, storage_writer=writer, planner=planner, process_group=group)
            return
        planner.set_up_planner({}, writer.storage_meta(), True)
        writer.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        writer.finish(metadata, [writer.write_data(plan, planner).value()])
    except CheckpointException as error:
        raise CheckpointError(_wrapped_error(error)) from error
    finally:
        writer.abandon()


def load(reader: CheckpointReader, planner: LoadPlanner, group: dist.ProcessGroup | None) -> None:
    """Read what all processes of the group need, or this one. Raises CheckpointError, in all of them, if one can't."""
    try:
        if group is not None:
            state_dict_loader.load({}, storage_reader=reader, planner=planner, process_group=group)
            return
        metadata = reader.read_metadata()
        planner.set_up_planner({}, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        plans = reader.prepare_global_plan(
            planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        )
        reader.read_data(planner.finish_plan(plans[0]), planner).wait()
    except CheckpointException as error:
        raise CheckpointError(_wrapped_error(error)) from error


def _wrapped_error(error: CheckpointException) -> str:
    """What went wrong, in each process where something did."""
    told = []
    for rank, (cause, _) in sorted(error.failures.items()):
        text = str(cause) if isinstance(cause, PatrickStarError) else f"{type(cause).__name__}: {cause}"
        told.append(f"rank {rank}: {text}")
    return "; ".join(dict.fromkeys(told))
