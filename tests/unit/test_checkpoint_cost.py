"""Times of checkpoints in estimates."""

from patrickstar._models.presets import PRESETS
from patrickstar._perf_model.checkpoint_cost import checkpoint_cost
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.workload import shape_workload

SERVER = find_machine("8xA100-40GB-11TB")


def test_a_checkpoint_is_written_by_all_nodes_to_their_disks_or_over_the_network():
    work = shape_workload(PRESETS["gpt-175b"], 1, True, Mesh(4, 8, 2))
    nbytes = 12 * PRESETS["gpt-175b"].numel
    cost = checkpoint_cost(work, SERVER, Mesh(4, 8, 2))
    assert (cost.nbytes, cost.save_s, cost.load_s) == (nbytes, nbytes / 4 / 3.5e9, nbytes / 4 / 3.5e9)
    diskless = SERVER.model_copy(update={"disk": None})
    assert checkpoint_cost(work, diskless, Mesh(4, 8, 2)).save_s == nbytes / 4 / SERVER.network.bandwidth
    assert checkpoint_cost(work, diskless.model_copy(update={"network": None}), Mesh(gpus=8)) is None
