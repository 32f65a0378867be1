"""Plans of transformers in several processes: what fake processes can't show."""

import pytest
import torch
import torch.distributed as dist

from patrickstar.errors import ModelError
from patrickstar.integrations._meshes import MeshSizes, meshes
from patrickstar.integrations.transformers import parallelize

from . import ranks
from .mesh_models import MODELS, batch


@ranks.in_processes(4)
def test_processes_with_plans():
    built = meshes(MeshSizes(4, 2, 4), "cpu")
    other_weights(built)
    memory(built)
    evaluation(built)


def other_weights(built) -> None:
    """Build one process's model with another seed: all are refused, whichever group they are in."""
    model = MODELS["mixtral"].whole(seed=int(dist.get_rank() == 2)).model
    with pytest.raises(
        ModelError, match=r"parameter 'model\.embed_tokens\.weight' has other values in other processes"
    ):
        parallelize(model, tp=built.tp)


def memory(built) -> None:
    """Show that a process's part does not keep the memory of the whole parameter."""
    model = MODELS["mixtral, tensors and experts"].parallel(built)
    for name, param in model.named_parameters():
        part = getattr(param, "to_local", lambda param=param: param)()
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size(), name


def evaluation(built) -> None:
    """Evaluate without gradients, where transformers' layers run on local tensors: the loss is the same."""
    model, whole = (MODELS["mixtral, tensors and experts"].parallel(built), MODELS["mixtral"].whole())
    ids, labels = batch(0, built.data.get_local_rank())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids, labels), whole.eval()(ids, labels))
