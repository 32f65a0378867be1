"""Calls into torch.distributed.checkpoint (DCP), with and without a process group."""

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from patrickstar._checkpoint.storage_reader import CheckpointReader
from patrickstar._checkpoint.storage_writer import CheckpointWriter
from patrickstar.errors import CheckpointError, PatrickStarError

# For a single process dcp.save and dcp.load issue a warning, so their steps are called directly.


def save(writer: CheckpointWriter, planner: SavePlanner, group: dist.ProcessGroup | None) -> None:
    """Save, collectively if there is a group. Raises CheckpointError if any process fails."""
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
    """Load, collectively if there is a group. Raises CheckpointError in all processes if any process fails."""
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
    messages = []
    for rank, (cause, _) in sorted(error.failures.items()):
        text = str(cause) if isinstance(cause, PatrickStarError) else f"{type(cause).__name__}: {cause}"
        messages.append(f"rank {rank}: {text}")
    return "; ".join(dict.fromkeys(messages))
