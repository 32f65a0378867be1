"""`patrickstar plan` for clusters, as a user types it."""

from functools import partial

import pytest
from command_line import assert_refused, assert_told, plan, planned

from patrickstar._models.presets import PRESETS
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._plan.planned_model import find_planned_model
from patrickstar.errors import ConfigError

SERVER = ("--machine", "8xA100-40GB-11TB")
run, as_json = partial(plan, *SERVER), partial(planned, *SERVER)


def test_a_plan_of_a_cluster_says_what_fits_what_it_waits_for_and_what_scaling_costs():
    result = run("--model", "t5-moe-1.2t", "--nodes", "96", "--tp", "2", "--ep", "768", "--sequence", "512")
    for words in (
        "2,304 experts in one of 2 layers, top-1, 1237.76 billion parameters: it fits",
        "96 nodes, each 8xA100-40GB-11TB with 8 GPUs: 768 processes; 96 replicas of one node, each with a copy",
        "of the dense parameters; tensor parallelism 2; expert parallelism 768",
        "tokens per tensor-parallel group",
        "GiB per process, on all tiers together",
        "busiest resource alone takes",
        "one GPU alone cannot train it, one node alone cannot train it",
        "waits for collectives of tensor and expert parallelism; the busiest process has 1.0",
        "at the rate of the disk of each node",
        "between nodes",
        "coordination",
        "each host",
        "Of the experts' states",
    ):
        assert words in result.output


def test_one_node_without_parallelism_is_the_plan_of_the_machine():
    plain = as_json("--model", "gpt-12b")
    assert as_json("--model", "gpt-12b", "--nodes", "1", "--tp", "1", "--ep", "1") == plain
    assert plain["mesh"] == {"nodes": 1, "gpus": 8, "tp": 1, "ep": 1, "replica_nodes": 1} and plain["processes"] == 8
    assert plain["efficiency"]["one_node"] is None and plain["efficiency"]["one_gpu"] > 0


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ("40GB", "4 replicas of one node, each with a copy of the parameters"),
        ("29GB", "2 replicas of 2 nodes, each with a copy of the parameters"),
        ("12GB", "one replica, whose parameters are gathered from all nodes"),
    ],
)
def test_replicas_are_as_small_as_the_memory_of_their_nodes_allows(memory, says):
    options = ("--machine", "DGX-A100-80GB", "--model", "gpt-12b", "--nodes", "4", "--batch", "1", "--device-memory")
    result = run(*options, "7GB", "--host-memory", memory, "--activation-checkpointing")
    assert says in result.output


def test_gpus_are_those_of_each_node():
    found = as_json("--model", "gpt-12b", "--nodes", "3", "--gpus", "4")
    assert found["processes"] == 12 and found["mesh"]["gpus"] == 4
    lanes = {lane["name"]: lane for lane in found["lanes"]}
    assert found["step_s"] >= found["bound_s"] == lanes[found["limited_by"]]["seconds"]
    params = PRESETS["gpt-12b"].numel
    assert lanes["between nodes"]["amount"] == pytest.approx(6 * params * 2 / 12, abs=1)
    assert found["model_data_bytes"] == pytest.approx(14 * params / 12 + 2 * params / 4, abs=1)
    alone = as_json("--model", "gpt-12b", "--gpus", "4")
    per_gpu = found["tokens_per_s"] / 12 / (alone["tokens_per_s"] / 4)
    assert found["efficiency"]["one_node"] == pytest.approx(per_gpu) and found["imbalance"] is None
    experts = as_json("--model", "gpt-moe-52b", "--nodes", "16", "--ep", "128", "--capacity-factor", "1.25")
    assert experts["imbalance"] == 1.25


def test_a_traced_configuration_is_planned_on_several_nodes_but_not_divided(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(PRESETS["gpt-1m"].config().to_json_string())
    machine = find_machine(SERVER[1])
    model = find_planned_model(str(path), 32, machine, None)
    assert model.workload(1, True, Mesh(2, 8)) is model.workload(1, True, Mesh()), "one trace for each process"
    with pytest.raises(ConfigError, match="only presets can be divided"):
        model.workload(1, True, Mesh(1, 8, tp=2))
    with pytest.raises(ConfigError, match=r"--capacity-factor 1.25 is for presets with experts: gpt-moe-52b"):
        find_planned_model(str(path), 32, machine, 1.25)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tp", "3"], "--tp 3 does not divide the 8 GPUs of a node; try --tp 1, 2, 4 or 8"),
        (["--largest", "--ep", "8"], "--ep 8: the model has no experts; try --ep 1"),
        (["--model", "gpt-moe-52b", "--ep", "5"], "--ep 5 does not divide the 8 processes"),
        (["--model", "gpt-12b", "--capacity-factor", "1.25"], "--capacity-factor 1.25: gpt-12b has no experts"),
        (["--nodes", "2", "--gpus", "9"], "--gpus 9: 8xA100-40GB-11TB has 8"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(arguments, says):
    """Other reasons are those of unit/test_mesh.py and unit/test_perf_model_clusters.py."""
    assert_told(run(*arguments), says)


def test_sizes_are_at_least_one():
    for option in ("--nodes", "--tp", "--ep"):
        assert_refused(run(option, "0"), f"Invalid value for '{option}'")
