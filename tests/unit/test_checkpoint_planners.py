"""Plans of checkpoints that do not hold all elements of a tensor are refused by name."""

from dataclasses import replace

import pytest
import torch
from checkpoint_cases import engine_of
from probes import model_data_of
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from patrickstar._checkpoint.load_planner import ShardLoadPlanner
from patrickstar._checkpoint.save_planner import ShardSavePlanner, param_shards
from patrickstar._layout.shard_geometry import Box
from patrickstar.errors import CheckpointError


def chunk(rows):
    """Return rows of the embedding, which has 13 of 24 elements."""
    return ChunkStorageMetadata(torch.Size((rows.start, 0)), torch.Size((rows.stop - rows.start, 24)))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([slice(0, 5), slice(8, 13)], r"lacks \[5:8, 0:24\] of model\.words\.weight"),
        ([], r"lacks \[0:13, 0:24\] of model\.words\.weight"),
        ([slice(0, 9), slice(8, 13)], r"has several values for elements of \[0:13, 0:24\] of model\.words\.weight"),
    ],
)
def test_checkpoint_that_lacks_elements(stored, message):
    engine = engine_of()
    planner = ShardLoadPlanner(model_data_of(engine), {})
    chunks = [chunk(rows) for rows in stored]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((13, 24)), chunks)
    planner.set_up_planner({}, Metadata({"model.words.weight": entry}))
    with pytest.raises(CheckpointError, match=message):
        planner.create_local_plan()
    engine.close()


def test_processes_that_lack_elements():
    engine = engine_of()
    data = model_data_of(engine)
    shards = param_shards(data, list(data.by_chunk))
    number = next(number for number, shard in enumerate(shards) if shard.name == "model.words.weight")
    shards[number] = replace(shards[number], box=Box((2, 0), (11, 24)))
    planner = ShardSavePlanner(shards, data)
    with pytest.raises(CheckpointError, match=r"no process holds elements \[0:2, 0:24\] of model\.words\.weight"):
        planner.create_global_plan([planner.create_local_plan(), SavePlan([])])
    engine.close()
